#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tool in C++ by itself and on 2, 4 and 8 workers, three seeds; and what a step of a C tool costs (half an hour on two shared cores).
. "$(dirname "$0")/../common.sh"
[ -z "$quick" ] || export C_TOOL="$results/tool" # compiled once
bench speed/c_tool_workers workers --long 0 --plot "$results/plot.png"
[ -n "$quick" ] || bench speed/c_tool_workers two --workers --long 12
bench speed/c_tool cost --frames 4000 --epochs 1 --workers 2 --rules bmuf

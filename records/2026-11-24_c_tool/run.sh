#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tool in C++ by itself and on 2, 4 and 8 workers, three seeds, six rates; and what a step of a C tool costs (two hours on two shared cores).
. "$(dirname "$0")/../common.sh"
[ -z "$quick" ] || export C_TOOL="$results/tool" # compiled once
bench speed/c_tool_workers workers --long 0
[ -n "$quick" ] || bench speed/c_tool_workers two --workers --long 12
bench speed/c_tool cost
"$python" "$here/plot.py" "$results"

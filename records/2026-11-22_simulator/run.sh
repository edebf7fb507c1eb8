#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Some minutes of one core.
. "$(dirname "$0")/../common.sh"
bench speed/sim result --steps 128
"$python" "$here/parts.py" ${quick:+4 8 1} | tail -n 1 > "$results/parts.json"

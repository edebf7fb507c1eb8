#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One more row of each table (as root, for network namespaces; a torchft that is installed has its row).
. "$(dirname "$0")/../common.sh"
bench speed/sync_cost sync_cost
bench speed/step_overhead step_overhead
"$python" "$here/early.py" ${quick:+--repeats 1 --elements 100000} | tail -n 1 > "$results/early.json"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs storms for ten minutes, looks for each planted bug (some minutes more), and draws.
. "$(dirname "$0")/../common.sh"
bench faults/storm result "$@"
"$python" "$here/plot.py" "$results"

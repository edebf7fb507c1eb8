#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains what results.jsonl does not hold (52 trainings a seed: 16 minutes of one core), then the table and the plot.
. "$(dirname "$0")/../common.sh"
"$python" "$here/run.py" --seeds 0 $quick
[ -n "$quick" ] || "$python" "$here/run.py" --seeds 1 2 --main
"$python" "$here/table.py"

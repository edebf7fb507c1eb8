#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes this record again: three seeds of the demo, then the table and the plot. About 9 minutes on 2 cores.
. "$(dirname "$0")/../common.sh"
sizes=(--minibatches 10000)
seeds=(0 1 2)
[ -z "$quick" ] || sizes=(--minibatches 64 --workers 2 --rule bmuf) seeds=(0)  # one worker and one of the ways
for seed in "${seeds[@]}"; do
    "$python" examples/char_lm/demo.py "${sizes[@]}" --seed "$seed" --out "out/record/$seed"
done
"$python" "$here/table.py" "${seeds[@]/#/out/record/}"

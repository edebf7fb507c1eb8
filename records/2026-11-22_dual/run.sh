#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes trainings.json, plot.png and all *.txt anew: some three hours of one core.
. "$(dirname "$0")/../common.sh"
out=out/dual
bench seeds/dual one --out $out/one
if [ -z "$quick" ]; then
    mkdir -p $out/four
    cp -r $out/one/prior-* $out/one/warm-0 $out/four/
    "$python" -m paceline run --workers 4 --rule "bmuf(period=8)" benchmarks/seeds/dual.py --one dual 0 --workers 4 \
        --second-rate 2e-3 --out $out/four
fi
digits=(--seeds 10)
[ -z "$quick" ] || digits=(--seeds 1 --steps 8)
"$python" examples/dual_digits/train.py --first-seed 10 "${digits[@]}" | tee "$results/digits.txt"
if [ -z "$quick" ]; then
    "$python" "$here/collect.py" $out
    PYTHONPATH=benchmarks/seeds:$PYTHONPATH "$python" "$here/errors.py" $out/one | tee "$here/errors.txt"
fi
"$python" "$here/plot.py"

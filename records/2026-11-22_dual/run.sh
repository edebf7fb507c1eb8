#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes trainings.json, reviews.txt, digits.txt and plot.png anew: some two and a half hours of one core.
set -e
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
out=out/dual
python benchmarks/dual.py --out $out/one
# the same on four workers, from the same language models
mkdir -p $out/four
cp -r $out/one/prior-* $out/four/
for method in warm dual; do
    paceline run --workers 4 --rule "bmuf(period=8)" benchmarks/dual.py --one $method 0 --workers 4 --out $out/four
done
python benchmarks/dual_reviews.py --out $out/reviews | tee "$here/reviews.txt"
python benchmarks/dual_reviews.py --out $out/reviews_400 --labelled 400 | tee "$here/reviews_400.txt"
python examples/dual_digits/train.py --first-seed 10 --seeds 10 | tee "$here/digits.txt"
python "$here/collect.py" $out
python "$here/plot.py"

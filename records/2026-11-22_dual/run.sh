#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes trainings.json, plot.png and all *.txt anew: some three hours of one core.
set -e
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
out=out/dual
python benchmarks/dual.py --out $out/one
# the same from the same warm start on four workers, which read as many sentences together
mkdir -p $out/four
cp -r $out/one/prior-* $out/one/warm-0 $out/four/
paceline run --workers 4 --rule "bmuf(period=8)" benchmarks/dual.py --one dual 0 --workers 4 --second-rate 2e-3 --out $out/four
python benchmarks/dual_reviews.py --out $out/reviews | tee "$here/reviews.txt"
python benchmarks/dual_reviews.py --writer words --out $out/reviews_words | tee "$here/reviews_words.txt"
python benchmarks/dual_reviews.py --writer words --labelled 500 --out $out/reviews_words_500 | tee "$here/reviews_words_500.txt"
python examples/dual_digits/train.py --first-seed 10 --seeds 10 | tee "$here/digits.txt"
python "$here/collect.py" $out
PYTHONPATH=benchmarks python "$here/errors.py" $out/one | tee "$here/errors.txt"
python "$here/plot.py"

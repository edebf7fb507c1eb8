#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains everything anew (half an hour of one quiet core) and draws the picture. Finished trainings are kept in
# out/dual_tables, so that it goes on where it was stopped. All but its quick form needs espeak-ng. The quick form
# leaves out the translators, which that of 2026-11-22_dual runs.
. "$(dirname "$0")/../common.sh"
out=out/dual_tables
bench seeds/dual_reviews writing --write --warm 500 --steps 500 --seeds 1 --jobs 1 --out $out/writing
bench seeds/dual_speech speech --jobs 1 --out $out/speech --only warm longer iterative dual full
[ -z "$quick" ] || exit 0

bench seeds/dual_reviews writing_seeds --write --warm 500 --steps 500 --seeds 3 --jobs 1 --weights 2 --out $out/writing
text=(--seeds 1 --dev 200 --test 500 --prefers 8 --typo 0 --prior-steps 500 --jobs 1)
same=(--labelled 3000 --unlabelled 6000 --style 0 --least 10 --warm 400)
"$python" benchmarks/seeds/dual.py "${text[@]}" "${same[@]}" --steps 800 --only full --out $out/same_style
bench seeds/dual same_style "${text[@]}" "${same[@]}" --steps 400 --only warm longer iterative dual full --out $out/same_style
mkdir -p $out/same_style_longer
cp -r $out/same_style/{prior-*,corpus.json,warm-0*,full-0*} $out/same_style_longer/
bench seeds/dual same_style_longer "${text[@]}" "${same[@]}" --steps 1000 --only warm dual full --out $out/same_style_longer
PYTHONPATH=benchmarks/seeds:$PYTHONPATH "$python" "$here/errors.py" $out/same_style | tee "$here/errors.txt"
free=(--labelled 500 --share 1 --unlabelled 3000 --style 0.5 --free 0.5 --least 12 --warm 600 --steps 300)
for weight in 0.01 0.1 1; do
    place=$out/free_$weight
    mkdir -p $place
    [ $weight = 0.01 ] || cp -r $out/free_0.01/{prior-*,corpus.json,warm-0*,longer-0*} $place/
    bench seeds/dual free_$weight "${text[@]}" "${free[@]}" --only warm longer constrained --constraint $weight --out $place
done
"$python" "$here/plot.py" "$results"

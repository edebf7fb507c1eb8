#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes trainings.json, limit.json and plot.png anew: some four hours of one core each, two trainings at a time.
set -e
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
out=out/lightrnn
python benchmarks/lightrnn.py --out $out/128
python benchmarks/lightrnn.py --out $out/128x8 --rounds 8 --seeds 1 --only lightrnn
python benchmarks/lightrnn.py --out $out/512 --dimension 512 --rate 0.004 --seeds 1 --only full lightrnn --bfloat16 full
python "$here/collect.py" $out
python "$here/plot.py"

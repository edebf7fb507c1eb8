#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes trainings.json, limit.json and plot.png anew: some four hours of one core each, two trainings at a time.
. "$(dirname "$0")/../common.sh"
out=out/lightrnn
bench seeds/lightrnn one --out $out/128
if [ -z "$quick" ]; then
    bench seeds/lightrnn eight_rounds --out $out/128x8 --rounds 8 --seeds 1 --only lightrnn
    bench seeds/lightrnn wide --out $out/512 --dimension 512 --rate 0.004 --seeds 1 --only full lightrnn --bfloat16 full
    "$python" "$here/collect.py" $out
fi
"$python" "$here/plot.py"

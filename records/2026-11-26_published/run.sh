#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares the planner with published measurements (seconds), measures the same grid on emulated links (40 minutes; an
# eighth of the model over links of an eighth of the rate, so that two cores can stand for four hosts), and draws.
. "$(dirname "$0")/../common.sh"
bench seeds/published published
if [ -z "$quick" ]; then # benchmarks/seeds/peers.py has a quick form of its own
    for period in 32 128; do
        bench seeds/peers grid$period --workers 4 --rates 625 125 25 6.25 --rounds 1 --parameters 3855840 --compute-ms 25 \
            --period $period --steps 2 --blocks 2 --row-timeout 900 \
            --rows ddp paceline_diloco paceline_bmuf_overlap paceline_streaming paceline_streaming_4bit
    done
fi
"$python" "$here/plot.py" "$results"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains everything anew (some two hours on two cores) and draws the pictures. Finished trainings are kept in out/blocks, so
# that it goes on where it was stopped.
. "$(dirname "$0")/../common.sh"
task=(--batch 16 --alone .25 --rate .5)
study() { # name, then the arguments of the benchmark
    bench quality/blocks "$1" "${@:2}" "${task[@]}" --plot "$results/$1.png"
}
study table table --minibatches 32768 \
    --methods sync_linear sync_best averaging averaging_best bmuf_paper bmuf_paper_classical diloco_paper bmuf
study gain gain --minibatches 32768 --exponents .4 .55 .7 .85 1.0
study period period --minibatches 32768 --periods 1 8 64 512
data() { # minibatches, then methods; with 524,288 a training takes a quarter of an hour
    bench quality/blocks "data-$1" table --workers 64 --seeds 1 "${task[@]}" --minibatches "$1" --methods "${@:2}"
}
if [ -z "$quick" ]; then
    data 32768 bmuf diloco_paper sync_best
    data 131072 bmuf diloco_paper sync_best
    data 262144 bmuf diloco_paper sync_best
    data 524288 bmuf diloco_paper
    bench quality/blocks more-131072 table --workers 16 4 --seeds 1 "${task[@]}" --minibatches 131072 --methods bmuf diloco_paper
fi
bench quality/blocks_by_data by_data "$here"/data-*.json --plot "$results/data.png"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains everything anew (some two hours on two cores) and draws the pictures. Finished trainings are kept in out/lines, so that it
# goes on where it was stopped.
. "$(dirname "$0")/../common.sh"
lines() { # name, then arguments of the benchmark
    bench quality/lines "$1" --period 8 --minibatches 32768 "${@:2}"
}
[ -n "$quick" ] || lines every-method --workers 1 8 32 --seeds 1
lines table --workers 1 8 32 64 --seeds 3 --block-rate 4e-3 --plot "$results/table.png" \
    --methods serial "serial, beta1 .5" "sync, rate times root N" "compensated, beta1 .5, gain auto" "compensated, gain auto" \
    "moments averaged, gain auto"
lines gain --workers 8 32 64 --seeds 1 --block-rate 4e-3 --exponents .1 .25 .4 .55 .7 .85 --plot "$results/gain.png"

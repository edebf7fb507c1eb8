#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains everything anew (some two hours on two cores) and draws the pictures; needs espeak-ng. Finished trainings are kept in
# out/speech, so that it goes on where it was stopped.
. "$(dirname "$0")/../common.sh"
speech() { # name, then arguments of the benchmark
    bench quality/speech "$1" --workers 4 8 16 --period 8 --minibatches 8192 --rates 2e-3 4e-3 8e-3 "${@:2}"
}
[ -n "$quick" ] || speech every-method --seeds 1
speech table --seeds 3 --methods serial "sync, rate times N" averaging bmuf "bmuf, beta1 kept" "diloco paper" --plot "$results/table.png"
speech gain --seeds 1 --exponents .4 .55 .7 .85 --plot "$results/gain.png"

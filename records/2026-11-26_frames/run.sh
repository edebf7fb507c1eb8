#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains everything anew (some half an hour on one quiet core) and draws the picture. Finished trainings are kept in
# out/time_to_quality, so that it goes on where it was stopped. All but its quick form needs espeak-ng.
. "$(dirname "$0")/../common.sh"
once=(--sizes 1 --timed none)
sgd=(--tasks frames-sgd "${once[@]}")
adam=(--tasks frames-adam "${once[@]}")
moments=({cold,uncompensated}{,-beta1=0.9})
ramp=sync-ramp=0.05-rate
bench quality/time_to_quality others "${sgd[@]}" --alone 0.125 0.5 --workers 16 --methods asgd $ramp={0.5,0.75,1} $ramp=0.75-momentum=0.9
bench quality/time_to_quality adam "${adam[@]}" --workers 16 64 --methods "${moments[@]}" $ramp=0.5
if [ -z "$quick" ]; then  # another record runs the quick form of these
    bench quality/time_to_quality table "${sgd[@]}" --alone 0.125 0.5 --workers 8 16 64 --methods cold averaging grown diloco
    bench quality/time_to_quality four "${sgd[@]}" --workers 4 --methods cold averaging
    bench quality/time_to_quality seeds_eight "${sgd[@]}" --seeds 3 --workers 8 --methods cold averaging{,-height=3}
    bench quality/time_to_quality asgd_few "${sgd[@]}" --workers 4 8 --methods asgd
    bench quality/time_to_quality more "${sgd[@]}" --alone 0.125 0.5 --workers 32 --methods cold averaging
    bench quality/time_to_quality many "${sgd[@]}" --workers 64 --methods cold-period={1,2} cold-start=0.0625 $ramp=0.75{,-momentum=0.9}
    bench quality/time_to_quality adam_many "${adam[@]}" --workers 64 --methods cold-period=1
    bench quality/time_to_quality adam_64 "${adam[@]}" --workers 64 --methods cold $ramp=0.5
    bench quality/time_to_quality adam_seeds "${adam[@]}" --seeds 3 --workers 16 --methods cold cold-beta1=0.9 uncompensated-beta1=0.9
    bench quality/time_to_quality seeds "${sgd[@]}" --seeds 3 --workers 16 --methods cold averaging{,-height=3}
    bench quality/time_to_quality seeds_many "${sgd[@]}" --seeds 3 --workers 64 --methods cold cold-period=1
    bench quality/time_to_quality rate "${sgd[@]}" --workers 8 16 --methods averaging-height=3
    bench quality/time_to_quality adam_rates "${adam[@]}" --minibatches 65536 --workers 1 \
        --methods serial serial-{height=0.5,height=2,beta1=0.5,height=0.5-beta1=0.5,height=2-beta1=0.5}
fi
"$python" "$here/plot.py" "$results"

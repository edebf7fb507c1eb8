#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains everything anew (a quarter of an hour on one quiet core) and draws the picture. Finished trainings are kept in
# out/time_to_quality, so that it goes on where it was stopped. All but its quick form needs espeak-ng.
. "$(dirname "$0")/../common.sh"
once=(--sizes 1 --timed none --gbit 1 10 40)
chat=(--tasks chat-sgd "${once[@]}" --parameters 10000000)
blstm=(--tasks blstm-adam "${once[@]}" --parameters 10000000)
pictures=(--tasks pictures-sgd "${once[@]}" --parameters 61100840 --step-s 0.8)
bench quality/time_to_quality chat "${chat[@]}" --workers 2 4 8 --methods asgd dcasgd
bench quality/time_to_quality pictures "${pictures[@]}" --workers 4 8 --methods averaging cold
if [ -z "$quick" ]; then
    bench quality/time_to_quality chat_half "${chat[@]}" --workers 4 8 --methods asgd-height=0.5
    bench quality/time_to_quality chat_seeds "${chat[@]}" --seeds 3 --workers 4 --methods asgd
    bench quality/time_to_quality chat_longer "${chat[@]}" --minibatches 16384 --workers 4 --methods asgd
    bench quality/time_to_quality blstm "${blstm[@]}" --workers 4 8 --methods averaging cold
    bench quality/time_to_quality blstm_seeds "${blstm[@]}" --seeds 3 --workers 8 \
        --methods averaging cold averaging-rate=0 cold-rate=0
    bench quality/time_to_quality blstm_others "${blstm[@]}" --workers 8 --methods cold-beta1=0.9
    bench quality/time_to_quality pictures_seeds "${pictures[@]}" --workers 4 --methods averaging cold
    bench quality/time_to_quality pictures_sync "${pictures[@]}" --workers 4 --methods sync-rate=0.5-ramp=0.1
    bench quality/time_to_quality pictures_longer "${pictures[@]}" --minibatches 32768 --alone 0.5 --workers 4 \
        --methods averaging cold
    bench quality/time_to_quality pictures_shorter "${pictures[@]}" --minibatches 8192 --workers 4 --methods averaging cold
    bench quality/time_to_quality rates "${once[@]}" --tasks chat-sgd blstm-adam pictures-sgd --workers 1 --minibatches 2048 \
        --methods serial-height=0.5 serial-height=2
fi
"$python" "$here/plot.py" "$results"

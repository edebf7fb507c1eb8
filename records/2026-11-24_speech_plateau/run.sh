#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains everything anew (half an hour on one quiet core) and draws the picture. Finished trainings are kept in
# out/time_to_quality, so that it goes on where it was stopped. All but its quick form needs espeak-ng.
. "$(dirname "$0")/../common.sh"
silent=(small-sgd small-adam small-lines)
once=(--sizes 1 --timed none)
more quality/time_to_quality speech --tasks small-speech --workers 8 32 64 "${once[@]}" \
    --methods grown cold sync-rate=0.5 sync-rate=0.75-momentum=0.9
more quality/time_to_quality speech_more --tasks small-speech --workers 4 16 "${once[@]}" --methods grown cold
more quality/time_to_quality speech_seeds --tasks small-speech --workers 32 64 --seeds 3 "${once[@]}" --methods grown cold
bench quality/time_to_quality others --tasks "${silent[@]}" small-speech --workers 8 32 64 "${once[@]}" \
    --methods grown cold diloco averaging
more quality/time_to_quality diloco --tasks "${silent[@]}" small-speech --workers 64 "${once[@]}" --methods diloco-rate=0
more quality/time_to_quality four --tasks "${silent[@]}" --workers 4 "${once[@]}" --methods grown cold sync-rate=0.29 \
    sync-rate=0.5 sync-rate=0.75 sync-rate=0.75-momentum=0.9 sync-rate=1-momentum=0.9
more quality/time_to_quality speedup --tasks "${silent[@]}" small-speech --workers 64 --sizes 1 2 4 --methods grown cold \
    --timed grown cold
bench quality/time_to_quality rates --tasks small-speech --workers 1 "${once[@]}" --methods serial-height=0.5 serial-height=2
"$python" "$here/plot.py" "$results"

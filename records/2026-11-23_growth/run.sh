#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains everything anew (some hour on one quiet core) and draws the pictures. Finished trainings are kept in
# out/time_to_quality, so that it goes on where it was stopped.
. "$(dirname "$0")/../common.sh"
sync=(sync-rate=0.29 sync-rate=0.5 sync-rate=0.75 sync-rate=0.75-momentum=0.9 sync-rate=1-momentum=0.9)
plateau=(--tasks small-sgd small-adam)
lines=(--tasks small-lines)
bench quality/time_to_quality plateau --tasks small-sgd small-adam small-lines --seeds 3 --methods grown "${sync[@]}"
bench quality/time_to_quality lines "${lines[@]}" --workers 32 64 --seeds 3 --sizes 1 --timed none --methods cold cold-rate=0 \
    amplified grown grown-threshold=0.65 grown-rate=0.4 grown-amplify=0 grown-amplify=0.25 grown-amplify=0.75 \
    grown-gain=0.7 grown-period=2 grown-period=8
more quality/time_to_quality lines_oracle "${lines[@]}" --workers 32 64 --seeds 3 --sizes 1 2 \
    --methods grown grown-period=2 sync-rate=0.75-momentum=0.9 --timed grown grown-period=2 sync-rate=0.75-momentum=0.9
more quality/time_to_quality changed "${plateau[@]}" --workers 16 64 --seeds 3 --sizes 1 --timed none --methods grown \
    grown-threshold=0.65 grown-gain=0.7
more quality/time_to_quality variants "${plateau[@]}" --workers 64 --sizes 1 --timed none --methods cold amplified grown \
    grown-threshold=0.65 grown-threshold=0.35 grown-rate=0.2 grown-rate=0.4 grown-amplify=0 grown-amplify=0.25 \
    grown-amplify=0.75 grown-gain=0.7 grown-period=2 grown-period=8
more quality/time_to_quality exponent "${plateau[@]}" --workers 4 16 32 --seeds 2 --sizes 1 --timed none --methods cold \
    amplified cold-rate=0 amplified-rate=0
more quality/time_to_quality exponent_more "${plateau[@]}" --workers 8 64 --seeds 2 --sizes 1 --timed none --methods cold cold-rate=0
more quality/time_to_quality exponent_far --tasks chars-sgd chars-adam --workers 8 32 --sizes 1 --timed none --methods cold \
    cold-rate=0
more quality/time_to_quality default --tasks small-sgd small-adam small-lines --workers 8 32 64 --sizes 1 --timed none \
    --methods cold grown
if command -v espeak-ng > /dev/null; then
    more quality/time_to_quality speech --tasks speech --workers 4 8 16 --sizes 1 --timed none --methods cold grown
fi
more quality/time_to_quality rates --tasks small-sgd small-adam small-lines --workers 1 --sizes 1 --timed none --methods \
    serial-height=0.5 serial-height=2
more quality/time_to_quality far --tasks chars-sgd chars-adam --workers 64 --methods grown grown-period=2 grown-period=4 \
    grown-threshold=0.65 grown-gain=0.7 "${sync[@]}"
more quality/time_to_quality far_seed --tasks chars-sgd chars-adam --workers 64 --sizes 1 --timed none --methods grown
"$python" "$here/plot.py" "$results"

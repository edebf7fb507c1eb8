#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains everything anew (a quarter of an hour on one quiet core) and draws the picture. Finished trainings are kept in
# out/time_to_quality, so that it goes on where it was stopped. All but its quick form needs espeak-ng.
. "$(dirname "$0")/../common.sh"
once=(--tasks frames-sgd --sizes 1 --timed none)
bench time_to_quality table "${once[@]}" --workers 8 16 64 --methods cold averaging grown diloco
bench time_to_quality rate "${once[@]}" --workers 8 16 --methods averaging-height=3
"$python" "$here/plot.py" "$results"

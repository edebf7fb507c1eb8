#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trainings of what the meter forecasts (some forty minutes of a core), then the picture.
. "$(dirname "$0")/../common.sh"
bench quality/quality_meter forecast
more quality/quality_meter plateau --tasks small-sgd small-adam --minibatches 65536
more quality/quality_meter from_16 --first 16 --workers 64
"$python" "$here/plot.py"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The cost of the meter (a minute), and trainings of what it forecasts (some forty minutes of a core), then the picture.
. "$(dirname "$0")/../common.sh"
bench quality_meter meter --parts cost
bench quality_meter forecast --parts forecast
bench quality_meter plateau --parts forecast --tasks small-sgd small-adam --minibatches 65536
bench quality_meter from_16 --parts forecast --first 16 --workers 64
"$python" "$here/plot.py"

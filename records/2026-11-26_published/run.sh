#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares the planner with published measurements (seconds), measures the same grid on emulated links (40 minutes; an
# eighth of the model over links of an eighth of the rate, so that two cores can stand for four hosts), and draws.
. "$(dirname "$0")/../common.sh"
bench seeds/published published
"$python" "$here/plot.py" "$results"

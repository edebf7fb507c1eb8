#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains everything anew (a quarter of an hour on one quiet core) and draws the picture. Finished trainings are kept in
# out/delay_compensation, so that it goes on where it was stopped.
. "$(dirname "$0")/../common.sh"
bench seeds/delay_compensation table --rows table few many halves why strengths rates published --seeds 0 1 2
"$python" "$here/plot.py" "$results"

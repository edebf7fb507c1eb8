#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Kills at the worst places, and what the weights say (some half an hour on two cores), then the picture.
. "$(dirname "$0")/../common.sh"
bench faults/counting elastic --mode elastic --kills 18 --seed 0
bench faults/counting restarts --mode restarts --kills 12 --seed 0
bench faults/counting asynchronous --mode asgd --mode dc_asgd --kills 32 --seed 0
"$python" "$here/plot.py"

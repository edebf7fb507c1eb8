#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Kills at the worst places, and what the weights say (some half an hour on two cores), then the picture.
. "$(dirname "$0")/../common.sh"
if [ -n "$quick" ]; then # one start, and one of the asynchronous rules
    bench faults/counting elastic --mode elastic --mode restarts --mode dc_asgd
else
    bench faults/counting elastic --mode elastic --kills 18 --seed 0
    bench faults/counting restarts --mode restarts --kills 12 --seed 0
    bench faults/counting asynchronous --mode asgd --mode dc_asgd --kills 32 --seed 0
fi
"$python" "$here/plot.py"

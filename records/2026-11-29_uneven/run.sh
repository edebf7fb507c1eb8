#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Four processes of unequal speed under every kind of rule, and the loss of blocks that end by time; half an hour on two cores.
. "$(dirname "$0")/../common.sh"
bench speed/straggler straggler --seconds 40 --repeats 1
more speed/straggler straggler_mixed --seconds 40 --repeats 1 --speeds 1,0.8,0.5,0.2
"$python" "$here/quality.py" --minibatches 4096 $quick | tee /dev/stderr | tail -n 1 > "$results/quality.json"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains six everyday programs on one machine and on 8 and 32 virtual workers, three seeds (five hours on two cores).
. "$(dirname "$0")/../common.sh"
bench quality/everyday results "$@"
"$python" "$here/oracle.py" $quick | tee /dev/stderr | tail -n 1 > "$results/oracle.json"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures what receipts cost, flips bits, and draws the picture; 5 minutes on busy cores.
. "$(dirname "$0")/../common.sh"
bench speed/receipts cost --steps 16
"$python" "$here/plot.py" "$results"

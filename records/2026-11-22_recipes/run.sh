#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains what curves.json does not hold (all of it: some ten minutes of one core), then prints the table and draws it.
. "$(dirname "$0")/../common.sh"
"$python" benchmarks/quality/recipes.py --minibatches 1536 --seeds 2 --out "$results/curves.json" $quick
"$python" "$here/table.py"

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Trains what curves.json does not hold (all of it: some ten minutes of one core), then prints the table and draws it.
set -e
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python benchmarks/recipes.py --minibatches 1536 --seeds 2 --out "$here/curves.json"
python "$here/table.py"

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Trains everything anew (some ten minutes of one core) and draws the pictures.
set -e
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python benchmarks/recipes.py --minibatches 2304 --seeds 2 --out "$here/curves.json"
python "$here/table.py"

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Measures all rows anew (as root, some 20 minutes on a quiet machine) and draws plot.png; prints one JSON object.
set -e
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python benchmarks/forecast.py | tee /dev/stderr | tail -n 1 > "$here/results.json"
python "$here/plot.py"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes this record again: three seeds of the demo, then the table and the plot. About 9 minutes on 2 cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
for seed in 0 1 2; do
    .venv/bin/python examples/char_lm/demo.py --seed "$seed" --out "out/record/$seed"
done
.venv/bin/python records/2026-11-21_bmuf_four_workers/table.py out/record/0 out/record/1 out/record/2

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the storm and what belongs to it, and keeps the last lines; then plots. As root (network namespaces), on a machine
# that does nothing else. PEERS may name a Python that has torchft 0.2.0.
set -eu
cd "$(dirname "$0")/../.."
here=records/2026-11-21_faults
out=${TMPDIR:-/tmp}/faults
python=${PYTHON:-.venv/bin/python}
run() {
    name=$1
    shift
    PYTHONPATH=src $python benchmarks/faults.py --out "$out" "$@" | tee /dev/stderr | tail -1 > "$here/$name.json"
}
run storm
cp "$out/storm/timeline.json" "$out/storm/faults.jsonl" "$here/"
run launcher --launcher --minutes 4 --no-calm
run kill --kill
run slow --slow --minutes 3
if [ -n "${PEERS:-}" ]; then
    run kill_stop --kinds kill,stop --minutes 4 --no-calm
    run peers --peers "$PEERS" --minutes 4
fi
$python $here/plot.py

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the storm and what belongs to it, and keeps the last lines; then plots. As root (network namespaces), on a machine
# that does nothing else.
. "$(dirname "$0")/../common.sh"
storms=out/faults
bench faults/faults storm --out "$storms"
cp "$storms/storm/timeline.json" "$storms/storm/faults.jsonl" "$results/"
if [ -z "$quick" ]; then
    bench faults/faults launcher --out "$storms" --launcher --minutes 4 --no-calm
    bench faults/faults slow --out "$storms" --slow --minutes 3
fi
bench faults/faults kill --out "$storms" --kill
bench faults/resume resume
"$python" "$here/plot.py"

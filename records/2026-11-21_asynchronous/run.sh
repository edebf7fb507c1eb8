#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains what results.jsonl does not hold (all 186 trainings: many hours of two cores), then the probe, the table, the plot.
. "$(dirname "$0")/../common.sh"
"$python" "$here/run.py" $quick
[ -n "$quick" ] || PYTHON=$python bash "$here/others.sh"
"$python" "$here/probe.py" $quick
"$python" "$here/table.py"

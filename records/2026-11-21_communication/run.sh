#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the three benchmarks of communication (as root, for network namespaces) and keeps their last line; then plots.
set -eu
cd "$(dirname "$0")/../.."
here=records/2026-11-21_communication
python=${PYTHON:-.venv/bin/python}
PYTHONPATH=src $python benchmarks/network.py "$@" | tee /dev/stderr | tail -1 > $here/network.json
PYTHONPATH=src $python benchmarks/hierarchical.py | tee /dev/stderr | tail -1 > $here/hierarchical.json
PYTHONPATH=src $python benchmarks/codecs.py | tee /dev/stderr | tail -1 > $here/codecs.json
$python $here/plot.py

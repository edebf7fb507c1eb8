#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The table of README.md: the commit before the change and the present one, in turn.
set -euo pipefail
cd "$(dirname "$0")/../.."
before=$(mktemp -d)
git archive d80651f src | tar x -C "$before"
"${PYTHON:-.venv/bin/python}" records/2026-11-22_install/measure.py 10 "$before/src" "$PWD/src" | tee records/2026-11-22_install/table.md

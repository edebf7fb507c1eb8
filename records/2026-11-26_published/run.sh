#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares the planner with published measurements, and draws the picture; seconds.
. "$(dirname "$0")/../common.sh"
bench published published
"$python" "$here/plot.py" "$results"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures the control plane with 10, 100 and 1,000 members (a minute), and draws. `before.json` is of the version before.
. "$(dirname "$0")/../common.sh"
bench speed/control result "$@"
"$python" "$here/plot.py" "$results"

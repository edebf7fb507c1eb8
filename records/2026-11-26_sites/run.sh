#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains at two sites behind routers, undisturbed and while one's cable is pulled twice (as root, for the network namespaces), and draws the picture; 9 minutes.
. "$(dirname "$0")/../common.sh"
bench faults/sites sites
"$python" "$here/plot.py" "$results"

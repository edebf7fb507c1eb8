#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures rings beside gloo and bare sockets (as root, for the network namespaces), and draws the picture; 4 minutes on busy cores.
. "$(dirname "$0")/../common.sh"
bench speed/ring after
"$python" "$here/plot.py" "$results"

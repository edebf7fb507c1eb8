#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the two benchmarks of communication (as root, for network namespaces) and keeps their last line; then plots.
. "$(dirname "$0")/../common.sh"
bench speed/network network "$@"
[ -n "$quick" ] || bench speed/network network_scale8 --scale 8
bench speed/hierarchical hierarchical
"$python" "$here/plot.py"

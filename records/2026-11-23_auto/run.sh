#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Times auto and rules chosen by hand on emulated links (as root, for network namespaces; some 25 minutes), then draws.
. "$(dirname "$0")/../common.sh"
bench speed/auto result "$@"
"$python" "$here/plot.py" "$results"

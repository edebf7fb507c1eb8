#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Times auto and rules chosen by hand on emulated links, also on links that change in mid-run (as root, for network
# namespaces; some 50 minutes), then draws.
. "$(dirname "$0")/../common.sh"
bench auto result "$@"
[ -n "$quick" ] || bench auto changes --links "" --changes 1000:100,100:1000 --compute-ms 200 --rule "bmuf(period=16)" \
    --rule "bmuf(period=4, overlap=4)" --rule "bmuf(period=16, overlap=16)" --rule "bmuf(period=64, overlap=64)" \
    --rule "bmuf(period=8, overlap=8, codec='int8')" --rule "bmuf(period=16, overlap=16, codec='int8')"
"$python" "$here/plot.py" "$results"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Types every way from one device to four workers on two machines (as root, for the network namespaces), and draws the picture.
. "$(dirname "$0")/../common.sh"
bench seeds/way_in ways --rounds 5
"$python" "$here/plot.py" "$results"

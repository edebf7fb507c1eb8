#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# 36 settings on emulated links (some half an hour, as root), then the picture.
. "$(dirname "$0")/../common.sh"
bench speed/forecast results
"$python" "$here/plot.py"

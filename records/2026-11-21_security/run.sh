#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Frames that are none at every door, 100,000 each (some hours).
. "$(dirname "$0")/../common.sh"
"$python" -m tests.security.fuzz --frames $([ -n "$quick" ] && echo 300 || echo 600000) --seed 0

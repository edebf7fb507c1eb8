#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the ten programs on one worker and on four (about half an hour on two quiet cores; finished runs are kept in out/zero_lines).
. "$(dirname "$0")/../common.sh"
bench quality/zero_lines results --seeds 2 --plot "$results/behind.png"

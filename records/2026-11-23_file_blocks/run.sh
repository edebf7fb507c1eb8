#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A closed tool on 4 workers by files, three seeds, and the processor time of a block (three minutes on two cores).
. "$(dirname "$0")/../common.sh"
bench speed/file_blocks results

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains four everyday programs on one machine and on 8 virtual workers, three seeds (half an hour on two cores).
. "$(dirname "$0")/../common.sh"
bench quality/everyday results --workers 8 --rules auto "$@"

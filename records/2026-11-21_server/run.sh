#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One more row of each table; about three minutes.
. "$(dirname "$0")/../common.sh"
bench speed/server server
bench speed/straggler straggler --seconds 8 --repeats 3
more speed/straggler straggler_50 --seconds 8 --repeats 3 --fast-ms 50

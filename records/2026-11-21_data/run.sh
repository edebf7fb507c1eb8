#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The rows of the tables (some half an hour; peers that are not installed are left out), then the plot.
. "$(dirname "$0")/../common.sh"
"$python" "$here/exactly_once.py" "$results/exactly_once.jsonl" $quick
bench speed/data ours --only loaders --rounds 5 --peers
[ -n "$quick" ] || bench speed/data loaders --only loaders --rounds 1
bench speed/data rest --only waiting
bench speed/data objects --only objects --rounds 15 --idle-s 20
"$python" "$here/plot.py" loaders.json objects.json

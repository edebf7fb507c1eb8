#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The rows of the tables (some half an hour; peers that are not installed are left out), then the plot.
. "$(dirname "$0")/../common.sh"
"$python" "$here/exactly_once.py" "$results/exactly_once.jsonl" $quick
if [ -n "$quick" ]; then # all parts in one process
    bench speed/data ours
    cp "$results/ours.json" "$results/rest.json"
    cp "$results/ours.json" "$results/objects.json"
else
    bench speed/data ours --only loaders --rounds 5 --peers
    bench speed/data loaders --only loaders --rounds 1
    bench speed/data rest --only waiting
    bench speed/data objects --only objects --rounds 15 --idle-s 20
fi
"$python" "$here/plot.py" loaders.json objects.json

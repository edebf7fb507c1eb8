#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The table of README.md: the commit before the change and the present one, in turn.
. "$(dirname "$0")/../common.sh"
if [ -n "$quick" ]; then
    "$python" "$here/measure.py" 1 "$PWD/src"
    exit
fi
before=$(mktemp -d)
git archive d80651f src | tar x -C "$before"
"$python" "$here/measure.py" 10 "$before/src" "$PWD/src" | tee "$here/table.md"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The five runs after, as pictures (a quarter of an hour; needs pyte, pillow and a Chromium). The quick form makes no
# pictures: it runs one worker's program, and a report of it. BEFORE is a checkout of 7edca25c with its .venv.
. "$(dirname "$0")/../common.sh"
if [ -n "$quick" ]; then
    [ -x "$PWD/$python" ] && python=$PWD/$python
    cp "$here/train.py" "$results"
    cd "$results"
    "$python" -m paceline run --workers 1 train.py whole 1 && "$python" -m paceline report
else
    [ -z "${BEFORE:-}" ] || "$python" "$here/screens.py" before "$BEFORE"
    "$python" "$here/screens.py" after .
fi

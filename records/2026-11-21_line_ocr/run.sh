#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The rows of seed 0 (about half an hour of two cores); the picture is that of the last.
. "$(dirname "$0")/../common.sh"
sizes=()
[ -z "$quick" ] || sizes=(--minibatches 48 --test-lines 16)
"$python" examples/line_ocr/train.py "${sizes[@]}" --out out/line_ocr/alone
for rule in "bmuf_adam(period=8)" "bmuf_adam(period=4)"; do
    "$python" -m paceline run --workers 4 --overwrite --log out/line_ocr/log --rule "$rule" \
        examples/line_ocr/train.py "${sizes[@]}" --out "out/line_ocr/$rule"
done

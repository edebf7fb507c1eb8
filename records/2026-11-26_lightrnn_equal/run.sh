#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes equal.json and plot.png anew: about ten minutes of one quiet core. Finished trainings are kept in
# out/lightrnn_equal, so that it goes on where it was stopped.
. "$(dirname "$0")/../common.sh"
bench seeds/lightrnn_equal equal
[ -n "$quick" ] || bench seeds/lightrnn_equal wide --only light-1024 adaptive-bytes-1024
sizes=(20000000 4)
[ -z "$quick" ] || sizes=(6000 1)
"$python" "$here/half.py" out/lightrnn_equal "${sizes[@]}" > "$results/half.json"
"$python" "$here/plot.py" "$results"

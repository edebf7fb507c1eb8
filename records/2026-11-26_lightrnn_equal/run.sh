#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes equal.json and plot.png anew: about ten minutes of one quiet core. Finished trainings are kept in
# out/lightrnn_equal, so that it goes on where it was stopped.
. "$(dirname "$0")/../common.sh"
bench lightrnn_equal equal
"$python" "$here/plot.py" "$results"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains everything anew (about half an hour on one quiet core) and draws the picture. Finished trainings are kept in
# out/within, so that it goes on where it was stopped.
. "$(dirname "$0")/../common.sh"
bench within result --methods mild curve branches unbounded
bench within grown --tasks small-sgd --methods curve-grow unbounded-grow
"$python" "$here/plot.py" "$results"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# An average of the models, and restarts of the momentum (some hour on two cores), then the picture. Finished trainings are
# kept in out/block_options, so that it goes on where it was stopped.
. "$(dirname "$0")/../common.sh"
bench quality/block_options average --seeds 3 --settings ema=0.9 ema=0.95
bench quality/block_options settings --seeds 1 --settings \
    ema=0.5 ema=0.8 ema=0.9 ema=0.95 ema=0.98 restart=8 restart=16 restart=32
bench quality/block_options heights --seeds 1 --rates "falling*2" "flat*2" --settings ema=0.95
bench quality/block_options one_worker --seeds 1 --workers 1 \
    --settings "momentum=0, lr=1, local_state='keep', alone=True, ema=0.997"
"$python" "$here/slow_momentum.py" "$results" ${quick:+--minibatches 256 --workers 4}
"$python" "$here/plot.py" "$results"

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Trainings beside the plan: other rates, strengths and rules. What is in results.jsonl already is not made again.
set -eu
cd "$(dirname "$0")"

line() { # task, minibatches, way, rule, workers, rate, seed
    printf '{"task": "%s", "minibatches": %s, "way": "%s", "rule": "%s", "workers": %s, "lr": %s, "seed": %s, ' "$@"
    printf '"delays": "geometric"}'
}

set --
for seed in 0 1 2; do
    mended="dc_asgd(kind='adaptive', strength=2.0, limit=1.0, overlap=0)"
    stronger="dc_asgd(kind='adaptive', strength=8.0, limit=1.0, overlap=0)"
    set -- "$@" \
        "$(line text 3200 'asgd, lower rate' 'asgd(overlap=0)' 16 4.0 $seed)" \
        "$(line text 3200 'asgd, lower rate' 'asgd(overlap=0)' 16 2.0 $seed)" \
        "$(line text 3200 'dc_asgd, published' "dc_asgd(kind='constant', overlap=0)" 16 8.0 $seed)" \
        "$(line text 3200 'dc_asgd, published' "dc_asgd(kind='adaptive', overlap=0)" 16 8.0 $seed)" \
        "$(line text 3200 'dc_asgd, stronger' "$stronger" 16 8.0 $seed)" \
        "$(line text 3200 'dc_asgd, lower rate' "$mended" 16 4.0 $seed)" \
        "$(line text 3200 'staleness_aware' 'staleness_aware(overlap=0)' 16 8.0 $seed)" \
        "$(line text 3200 'asgd, overlap' 'asgd(overlap=1)' 16 8.0 $seed)" \
        "$(line text 3200 'asgd, overlap' 'asgd(overlap=1)' 4 8.0 $seed)"
done
for seed in 0 1 2; do
    set -- "$@" "$(line digits 5760 'asgd, lower rate' 'asgd(overlap=0)' 16 0.1 $seed)"
done
exec "${PYTHON:-python}" run.py --other "$@"

# SPDX-License-Identifier: Apache-2.0
"""Whether workers make enough blocks to learn together, and what to change if not.

128 blocks of 64 workers ended 10 % above one worker's loss, 8 blocks of 8 workers 13 % (records/2026-11-22_blocks); 22
blocks of 16 were level with it (docs/guide/start.md).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.rules.rule import Rule

EPOCHS, MANY = 2, 20
"""Before a training, whose epochs are not known: those for which a remedy suits, and those that need no warning."""


def needed(workers: int) -> int:
    """Blocks that so many workers need at least: 64 workers some 100."""
    blocks = max(10, math.ceil(math.pow(workers, 1.1)))
    return blocks if blocks < 50 else math.ceil(blocks / 10) * 10


def before(rule: Rule, workers: int, minibatches: int) -> str:
    """A warning where an epoch has so few `minibatches` of each worker; "" where it has enough, or the rule adapts."""
    period, each = rule.schedule.period, math.ceil(minibatches / rule.schedule.period)  # workers meet after an epoch
    enough = minibatches >= period and needed(workers) <= MANY * each
    adapts = not rule.schedule.exchanges_blocks or rule.schedule.follows_times or rule.schedule.grow is not None
    if workers == 1 or period == 1 or not each or enough or adapts:
        return ""
    return (
        f"{workers} workers make {minibatches:,} minibatch{'es' * (minibatches > 1)} an epoch each, {each} "
        f"block{'s' * (each > 1)} of {rule.name}(period={period}), and need some {needed(workers)}: below "
        f"{math.ceil(needed(workers) / each)} epochs {_remedy(period, workers, EPOCHS * minibatches)}"
    )


def after(period: int, workers: int, minibatches: int, blocks: int) -> str:
    """A sentence where each worker made so few `blocks` of so many `minibatches` in all; "" where they suffice."""
    if workers == 1 or period == 1 or not 0 < blocks < needed(workers):
        return ""
    few = f"{blocks} block{'s' * (blocks > 1)} in all: too few for {workers} workers"
    remedy = _remedy(period, workers, minibatches)
    return f"{few}, which need some {needed(workers)}. For so little data {remedy}."


def _remedy(period: int, workers: int, minibatches: int) -> str:
    enough = (k for k in range(workers - 1, 1, -1) if workers * minibatches >= k * period * needed(k))
    fewer, least = next(enough, 1), max(1, min(period - 1, minibatches // needed(workers)))
    return f"take {f'{fewer} workers' if fewer > 1 else 'one worker'}, or period={least}"

# SPDX-License-Identifier: Apache-2.0
"""Whether workers make enough blocks to learn together, and what to change if not.

128 blocks of 64 workers ended 10 % above one worker's loss, and 8 blocks of 8 workers 13 %
(records/2026-11-22_blocks). So `needed` is the least with which a training can be worth its workers.
"""

from __future__ import annotations

import math

EPOCHS = 2
"""For which workers or a period are suggested before a training, whose length is not known then."""
MANY_EPOCHS = 20
"""Needs that so many epochs meet are not worth a warning."""


def needed(workers: int) -> int:
    """Blocks that so many workers need.

    >>> needed(4), needed(64)
    (10, 96)
    """
    return max(10, math.ceil(1.5 * workers))


def before(name: str, period: int, workers: int, minibatches: int) -> str:
    """A warning, where an epoch has few blocks; "" otherwise.

    Args:
        name: of the rule.
        period: minibatches of a block.
        workers: N.
        minibatches: of each worker in an epoch.
    """
    blocks, each = needed(workers), math.ceil(minibatches / period)  # workers meet after an epoch, too
    if workers == 1 or period == 1 or not each or (minibatches >= period and blocks <= MANY_EPOCHS * each):
        return ""
    return (
        f"{workers} workers make {minibatches:,} minibatches an epoch each, {each} block{'s' * (each > 1)} of "
        f"{name}(period={period}), and need some {round(blocks, -1)} blocks: for fewer than "
        f"{math.ceil(blocks / each)} epochs {_remedy(period, workers, EPOCHS * minibatches)}"
    )


def after(period: int, workers: int, minibatches: int, blocks: int) -> str:
    """A sentence on a training that had few blocks; "" otherwise; `minibatches` and `blocks` are those of a worker."""
    if workers == 1 or period == 1 or not 0 < blocks < needed(workers):
        return ""
    return (
        f"{blocks} block{'s' * (blocks > 1)} in all: too few for {workers} workers, which need some "
        f"{round(needed(workers), -1)}. For so little data {_remedy(period, workers, minibatches)}."
    )


def _remedy(period: int, workers: int, minibatches: int) -> str:
    """Fewer workers, or a shorter period, with which so many minibatches of each of N workers suffice."""
    enough = (k for k in range(workers - 1, 1, -1) if workers * minibatches >= k * period * needed(k))
    fewer = next(enough, 1)
    least = max(1, min(period - 1, minibatches // needed(workers)))
    return f"take {f'{fewer} workers' if fewer > 1 else 'one worker'}, or period={least}"

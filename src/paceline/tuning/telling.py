# SPDX-License-Identifier: Apache-2.0
"""Says what a bound on the held-out loss leads to: in the event log of every worker, and on rank 0 in its own log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from paceline.core.world import World
from paceline.tuning.measured import MeasuredChoices

logger = logging.getLogger("paceline")


def tell(measured: MeasuredChoices, world: World, note: Callable[..., None], steps: int) -> None:
    """Say what was decided since the last call.

    Args:
        measured: decides.
        world: this worker.
        note: writes an event.
        steps: minibatches of this worker.
    """
    for text, numbers in measured.told():
        if world.rank == 0:
            logger.log(logging.WARNING if numbers["event"] == "silent" else logging.INFO, "%s", text)
        note("within", text=text, **numbers, total_minibatches=steps)


def conclude(
    measured: MeasuredChoices, world: World, note: Callable[..., None], steps: int, spent_s: Sequence[float]
) -> None:
    """The training is over: say what was given up.

    Args:
        measured, world, note, steps: as of `tell`.
        spent_s: on computing, on waiting and on exchanging.
    """
    text = measured.conclusion(spent_s[2] / sum(spent_s) if sum(spent_s) else 0.0)
    if not text:
        return
    tell(measured, world, note, steps)
    if world.rank == 0:
        logger.info("%s", text)
    note("within", text=text, event="end", total_minibatches=steps)

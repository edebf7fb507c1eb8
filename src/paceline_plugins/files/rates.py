# SPDX-License-Identifier: Apache-2.0
"""The rate of a block.

    r_b = r_0 (r_end / r_0)^(b / B) f_b        b = 0 .. B - 1 over all epochs; without r_end  r_b = r_0 f_b

f_b is the factor of :mod:`paceline.tuning.schedules` so far. What `paceline tune` sets comes on top
(:func:`paceline.doors.adapters.elsewhere.tuned`).
"""

from __future__ import annotations

from typing import Any

from paceline.core.world import World
from paceline.tuning import Newbob


def scheduled(start: float, end: float | None, block: int, blocks: int) -> float:
    """The rate of a block before Newbob's factor."""
    return start if end is None else start * (end / start) ** (block / max(1, blocks))


class Halving:
    """Newbob over the losses that the tools report; every worker sees the same mean, and scales its own rate at once.

    Args:
        messages: of the run, for the mean.
    """

    def __init__(self, messages: Any, **options: float) -> None:
        self.factor = 1.0  # of the rate
        self._newbob = Newbob(_Local(self, messages), **options)  # type: ignore[arg-type]

    def validated(self, loss: float) -> bool:
        """Call it on every worker with the loss of its tool; returns whether to stop."""
        return self._newbob.validated(loss)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"factor": self.factor, "newbob": self._newbob.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.factor = float(state["factor"])
        self._newbob.load_state_dict(state["newbob"])


class _Local:
    """What Newbob asks of a run, so that a halving waits for no exchange: each worker is the one that tunes."""

    world = World()

    def __init__(self, halving: Halving, messages: Any) -> None:
        self._halving, self.messages = halving, messages

    def tune(self, lr_factor: float) -> None:
        self._halving.factor *= lr_factor

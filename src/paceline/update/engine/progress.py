# SPDX-License-Identifier: Apache-2.0
"""This worker's steps, and whether the next one exchanges gradients, by the rule's schedule."""

from __future__ import annotations

from paceline.rules.schedule import Schedule


class TrainingProgress:
    """Counts one worker's steps.

    Args:
        schedule: the rule's.

    Attributes:
        steps: minibatches since attach.
        lockstep: whether gradients are exchanged before the next step: always, or during the warm-up.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.steps = schedule, 0
        self.warm = False

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over; a worker that left during it learns this from its peers."""
        return self._warm

    @warm.setter
    def warm(self, now: bool) -> None:
        self._warm, self.lockstep = now, self.schedule.is_lockstep(now)

    @property
    def exchanges(self) -> int:
        """Exchanges that a single worker would have made by now."""
        return self.schedule.exchanges_after(self.steps)

    def follow(self, steps: int) -> None:
        """Continue after `steps` steps, as the other workers do."""
        self.steps = steps

    def stepped(self) -> bool:
        """Count a step; returns whether it ends the warm-up (`warm` is set once all workers have the same start)."""
        self.steps += 1
        return self.lockstep and self.schedule.ends_warmup(self.steps)

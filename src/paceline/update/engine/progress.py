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
        warm: whether the warm-up is over.
        lockstep: whether gradients are exchanged before the next step: always, or during the warm-up.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.restore(0, False)

    def end_warmup(self) -> None:
        """The warm-up is over; a worker that left during it learns this from its peers."""
        self.restore(self.steps, True)

    def follow_schedule(self, schedule: Schedule, blocks: bool) -> None:
        """Continue under another schedule; `blocks`: whether it has blocks now."""
        self.schedule = schedule
        self.restore(self.steps, self.warm and blocks)

    def restore(self, steps: int, warm: bool) -> None:
        """Continue from a checkpoint."""
        self.steps, self.warm, self.lockstep = steps, warm, self.schedule.is_lockstep(warm)

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

# SPDX-License-Identifier: Apache-2.0
"""Flow control: what is due before and after a step of the optimizer, by the rule's schedule."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.rules.schedule import Schedule


@dataclass
class Flow:
    """Counts one worker's steps.

    Attributes:
        schedule: the rule's.
        steps: minibatches since attach.
        warm: whether the warm-up is over; a worker that left during it is told by the others.
    """

    schedule: Schedule
    steps: int = 0
    warm: bool = False

    @property
    def lockstep(self) -> bool:
        """Whether gradients are exchanged before the next step: always, or during the warm-up."""
        return self.schedule.is_lockstep(self.warm)

    @property
    def exchanges(self) -> int:
        """What a worker that has nobody to exchange with would have exchanged by now."""
        return self.schedule.exchanges_after(self.steps)

    def stepped(self) -> bool:
        """Count a step; whether the warm-up is over with it (and whoever is told so sets `warm`)."""
        lockstep = self.lockstep
        self.steps += 1
        return lockstep and self.schedule.ends_warmup(self.steps)

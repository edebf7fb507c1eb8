# SPDX-License-Identifier: Apache-2.0
"""When the exchange of each fragment begins."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.rules.schedule import EveryBlock


@dataclass
class FragmentSchedule:
    """Where the sequence of exchanges stands.

    Attributes:
        since: of each fragment, minibatches since its last exchange began.
        made: fragment -> minibatches made since its exchange began, of those under way.
        begun: exchanges begun so far, by any worker.
        steps: minibatches since the first block began.
        at: after which of these steps the last exchanges began, one of each fragment.
        shift: minibatches by which changes of the period have moved the schedule.
        asked: after which of these steps the workers read their requests to one another.
    """

    since: list[int]
    made: dict[int, int] = field(default_factory=dict)
    begun: int = 0
    steps: int = 0
    at: list[int] = field(default_factory=list)
    shift: int = 0
    asked: list[int] = field(default_factory=list)

    def stepped(self) -> None:
        """A minibatch was made."""
        self.steps += 1
        self.since = [n + 1 for n in self.since]
        self.made = {fragment: n + 1 for fragment, n in self.made.items()}

    def ends(self, schedule: EveryBlock) -> int:
        """After which step the next exchange begins: by the schedule, but never before it can."""
        step = schedule.ends(self.begun) + self.shift
        if self.at:
            step = max(step, self.at[-1] + 1)
        if len(self.at) == schedule.fragments:
            step = max(step, self.at[0] + schedule.overlap)  # the fragment's last exchange has landed by then
        return step

    def begin(self, schedule: EveryBlock) -> None:
        """The next exchange begins."""
        self.at = [*self.at, self.ends(schedule)][-schedule.fragments :]
        self.begun += 1

    def retime(self, before: EveryBlock, after: EveryBlock, now: int) -> None:
        """Go on with another period: the block under way ends when it has as many minibatches, or at once."""
        last = self.at[-1] if self.at else before.ends(self.begun - 1) + self.shift
        gap = after.ends(self.begun) - after.ends(self.begun - 1)
        self.shift = max(last + gap, now) - after.ends(self.begun)

    def hear(self, fragment: int, overlap: int) -> None:
        """A worker announced a request with a fragment's exchange: read it once all workers have landed that."""
        number = self.begun - 1 - (self.begun - 1 - fragment) % len(self.since)
        self.asked = sorted([*self.asked, self.at[number - self.begun] + overlap])

# SPDX-License-Identifier: Apache-2.0
"""The fragment schedule: when each fragment's exchange begins and lands."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.rules.schedule import EveryBlock


@dataclass
class FragmentSchedule:
    """Position in the sequence of exchanges.

    Attributes:
        since: of each fragment, minibatches since its last exchange began.
        made: fragment -> minibatches since its exchange began, of those in flight.
        begun: exchanges begun so far, by any worker.
        steps: minibatches since the first block began.
        at: the steps after which the last exchanges began, one for each fragment.
        shift: minibatches by which changes of the period have moved the schedule.
        requests: the steps after which workers gather tuning requests.
    """

    since: list[int]
    made: dict[int, int] = field(default_factory=dict)
    begun: int = 0
    steps: int = 0
    at: list[int] = field(default_factory=list)
    shift: int = 0
    requests: list[int] = field(default_factory=list)

    def stepped(self) -> None:
        """Count a minibatch."""
        self.steps += 1
        self.since = [n + 1 for n in self.since]
        self.made = {fragment: n + 1 for fragment, n in self.made.items()}

    def ends(self, schedule: EveryBlock) -> int:
        """The step after which the next exchange begins: the schedule's, or the first possible one."""
        step = schedule.ends(self.begun) + self.shift
        if self.at:
            step = max(step, self.at[-1] + 1)
        if len(self.at) == schedule.fragments:
            step = max(step, self.at[0] + schedule.overlap)  # the fragment's last exchange has landed by then
        return step

    def begin(self, schedule: EveryBlock) -> None:
        """Count the beginning of the next exchange."""
        self.at = [*self.at, self.ends(schedule)][-schedule.fragments :]
        self.begun += 1

    def retime(self, before: EveryBlock, after: EveryBlock, now: int) -> None:
        """Change the period: the present block ends when it has that many minibatches, or at once if it has more."""
        last = self.at[-1] if self.at else before.ends(self.begun - 1) + self.shift
        gap = after.ends(self.begun) - after.ends(self.begun - 1)
        self.shift = max(last + gap, now) - after.ends(self.begun)

    def add_request(self, fragment: int, overlap: int) -> None:
        """Schedule the gathering of a request, announced with a fragment's exchange, after all workers landed that."""
        number = self.begun - 1 - (self.begun - 1 - fragment) % len(self.since)
        self.requests = sorted([*self.requests, self.at[number - self.begun] + overlap])

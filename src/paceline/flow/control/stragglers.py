# SPDX-License-Identifier: Apache-2.0
"""Calls members to the next exchange when others wait there, and times the wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.flow.control.messages import Terms
from paceline.flow.control.roll_call import RollCall


class StragglerCalls:
    """The calls to one exchange after another.

    Args:
        terms: the user's settings.

    Attributes:
        first: since when a member waits at the exchange; None: none does.
        hurried: whether a member waits there that leaves after it.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.first: float | None = None
        self.hurried = False
        self._enough: float | None = None  # since when the quorum has reached it

    def over(self) -> None:
        """The exchange is committed."""
        self.first, self._enough, self.hurried = None, None, False

    def again(self, now: float) -> None:
        """The exchange restarts with other members."""
        if self.first is not None:
            self.first = now

    def away(self, gap_s: float) -> None:
        """Do not count `gap_s` seconds."""
        self.first = None if self.first is None else self.first + gap_s
        self._enough = None if self._enough is None else self._enough + gap_s

    def due(self, roll: RollCall, now: float, unmerged: Callable[[], bool]) -> list[int]:
        """The members to call now; each is called once.

        Args:
            roll: of the live members, for the next exchange.
            now: the time.
            unmerged: whether an idle member holds places whose work is in no commit.
        """
        called: Iterable[int] = ()
        if roll.come:
            self.first = now if self.first is None else self.first
            called = roll.uncalled if self.hurried or self._grace_is_over(len(roll.come), now) else roll.due
        else:
            self.over()
            if len(roll.idle) == len(roll.present) and unmerged():
                called = roll.uncalled
        return sorted(called)

    def _grace_is_over(self, started: int, now: float) -> bool:
        if self._terms.grace_s is None or started < self._terms.min_workers:
            return False
        self._enough = now if self._enough is None else self._enough
        return now >= self._enough + self._terms.grace_s

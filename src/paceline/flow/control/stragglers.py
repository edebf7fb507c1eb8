# SPDX-License-Identifier: Apache-2.0
"""Calls members to the next exchange when others wait there, and times the wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.flow.control.messages import Terms
from paceline.flow.control.worker_record import WorkerRecord


class StragglerCalls:
    """The calls to one exchange after another.

    Args:
        terms: the user's settings.

    Attributes:
        first: since when a member waits at the exchange; None: none does.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.first: float | None = None
        self._enough: float | None = None  # since when the quorum has reached it

    def over(self) -> None:
        """The exchange is committed."""
        self.first = self._enough = None

    def again(self, now: float) -> None:
        """The exchange restarts with other members."""
        if self.first is not None:
            self.first = now

    def away(self, gap_s: float) -> None:
        """Do not count `gap_s` seconds."""
        self.first = None if self.first is None else self.first + gap_s
        self._enough = None if self._enough is None else self._enough + gap_s

    def come(self, members: Sequence[WorkerRecord], exchange: int) -> list[WorkerRecord]:
        """The members that have reached the exchange."""
        return [one for one in members if one.started >= exchange or one.commit is not None]

    def due(
        self, members: Sequence[WorkerRecord], exchange: int, now: float, unmerged: Callable[[list[int]], bool]
    ) -> list[WorkerRecord]:
        """The members to call now; each is called once.

        Args:
            members: all live ones.
            exchange: the next one.
            now: the time.
            unmerged: whether one of these workers holds places whose work is in no commit.
        """
        started = self.come(members, exchange)
        idle = [one for one in members if one.idle]
        called: Sequence[WorkerRecord] = []
        if started:
            self.first = now if self.first is None else self.first
            called = [one for one in members if one.idle or one.late]
            if self._grace_is_over(len(started), now):
                called = members
            return self._new(called, exchange)
        self.over()
        if len(idle) == len(members) and unmerged([one.worker for one in idle if not one.waits]):
            called = members
        return self._new(called, exchange)

    def _new(self, called: Sequence[WorkerRecord], exchange: int) -> list[WorkerRecord]:
        return [one for one in called if max(one.called, one.started) < exchange]

    def _grace_is_over(self, started: int, now: float) -> bool:
        if self._terms.grace_s is None or started < self._terms.min_workers:
            return False
        self._enough = now if self._enough is None else self._enough
        return now >= self._enough + self._terms.grace_s

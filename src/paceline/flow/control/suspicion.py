# SPDX-License-Identifier: Apache-2.0
"""Suspicion: which members are accused after an exchange failed although no member is known to be dead."""

from __future__ import annotations

from collections.abc import Iterable, Set

TIMES = 3
"""Failures of one exchange after which the most accused member is declared lost."""


class Suspicion:
    """The complaints about one exchange.

    Attributes:
        since: time of this generation's first complaint; None: there was none.
        why: its reason.
        unheard: members that have given no sign of life since then.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.why = ""
        self.unheard: set[int] = set()
        self._failures = 0
        self._accusers: dict[int, set[int]] = {}

    def begin(self, why: str, members: Iterable[int], now: float) -> None:
        """The first complaint of a generation: each of its members has to give a sign of life."""
        self.since, self.why, self.unheard = now, why, set(members)

    def accuse(self, worker: int, suspects: Iterable[int]) -> None:
        """`worker`, which lives, accuses `suspects`."""
        self.unheard.discard(worker)
        for one in suspects:
            if one != worker:
                self._accusers.setdefault(one, set()).add(worker)

    def heard(self, worker: int, now: float) -> None:
        """A sign of life of a member."""
        if self.since is not None and now > self.since:
            self.unheard.discard(worker)

    def again(self, members: Set[int]) -> int | None:
        """The exchange failed, and all members live; returns the member to declare lost, after `TIMES` failures."""
        self._failures += 1
        accused = {one: len(by & members) for one, by in self._accusers.items() if one in members}
        if self._failures < TIMES or not any(accused.values()):
            return None
        return max(accused, key=lambda one: (accused[one], one))  # of two that accuse each other, the newer

    def over(self) -> None:
        """A new generation was formed."""
        self.since = None

    def forget(self) -> None:
        """The exchange is committed."""
        self.since, self._failures = None, 0
        self._accusers.clear()

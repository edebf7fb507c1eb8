# SPDX-License-Identifier: Apache-2.0
"""An exchange failed and no member is known to be dead: whom the members suspect, and how often in a row."""

from __future__ import annotations

from collections.abc import Sequence

TIMES = 3
"""Failures of one exchange after which the member that most others accuse is given up."""


class Suspicion:
    """The complaints about one exchange.

    Attributes:
        since: when the first complaint of this generation came; None: there was none.
        why: what that one said.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.why = ""
        self._failures = 0
        self._accusers: dict[int, set[int]] = {}

    def accuse(self, name: str, worker: int, why: str, suspects: Sequence[int], now: float) -> None:
        """`worker` complains, and suspects others."""
        if self.since is None:
            self.since, self.why = now, f"{name}: {why}"
        for one in suspects:
            if one != worker:
                self._accusers.setdefault(one, set()).add(worker)

    def again(self, members: Sequence[int]) -> int | None:
        """The exchange has failed, and all live; who is to be given up, as it happened too often."""
        self._failures += 1
        accused = {one: len(by & set(members)) for one, by in self._accusers.items() if one in members}
        if self._failures < TIMES or not any(accused.values()):
            return None
        return max(accused, key=lambda one: (accused[one], one))  # of two that accuse each other, the newer

    def over(self) -> None:
        """There is a new generation."""
        self.since = None

    def forget(self) -> None:
        """The exchange is committed."""
        self.since, self._failures = None, 0
        self._accusers.clear()

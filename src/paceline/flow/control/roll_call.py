# SPDX-License-Identifier: Apache-2.0
"""The roll call of an exchange: which members have come, are idle, have committed.

With a thousand members, a message must not cost time for each of them. So the sets are changed one by one.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.flow.control.worker_record import WorkerRecord


class RollCall:
    """Numbers of live members; call `note` whenever a member's record has changed.

    Attributes:
        present: all of them.
        come: have reached the exchange.
        idle: an exchange would not interrupt them.
        uncalled: were neither called to the exchange, nor have come by themselves.
        due: those of them that are idle or late.
        missing: have not committed.
        stateless: do not hold the state.
        dry: asked for data and got none.
    """

    def __init__(self) -> None:
        self.begin((), 0)

    def begin(self, members: Iterable[WorkerRecord], exchange: int) -> None:
        """From now on of these members, and of this exchange."""
        rows = [(one.worker, one) for one in members]  # set by set, which for a thousand is faster than `note`
        self.exchange = exchange
        self.present = {worker for worker, _ in rows}
        self.come = {worker for worker, one in rows if one.started >= exchange or one.commit is not None}
        self.idle = {worker for worker, one in rows if one.dry or one.left or one.waits}
        self.uncalled = {worker for worker, one in rows if one.called < exchange and one.started < exchange}
        self.due = self.uncalled & (self.idle | {worker for worker, one in rows if one.late})
        self.missing = {worker for worker, one in rows if one.commit is None}
        self.stateless = {worker for worker, one in rows if not one.holds}
        self.dry = {worker for worker, one in rows if one.dry}

    def note(self, one: WorkerRecord) -> None:
        """A member's record is new, or has changed."""
        worker, idle = one.worker, one.idle
        uncalled = one.called < self.exchange and one.started < self.exchange
        self.present.add(worker)
        _put(self.come, worker, one.started >= self.exchange or one.commit is not None)
        _put(self.idle, worker, idle)
        _put(self.uncalled, worker, uncalled)
        _put(self.due, worker, uncalled and (idle or one.late))
        _put(self.missing, worker, one.commit is None)
        _put(self.stateless, worker, not one.holds)
        _put(self.dry, worker, one.dry)

    def forget(self, worker: int) -> None:
        """It is lost, or has left."""
        for some in self.sets():
            some.discard(worker)

    def sets(self) -> tuple[set[int], ...]:
        """All of them."""
        return (
            self.present,
            self.come,
            self.idle,
            self.uncalled,
            self.due,
            self.missing,
            self.stateless,
            self.dry,
        )


def _put(some: set[int], worker: int, into: bool) -> None:
    if into:
        some.add(worker)
    else:
        some.discard(worker)

# SPDX-License-Identifier: Apache-2.0
"""Points at which all workers wait for all: checkpoints, the end of the work, and the end of the run."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.errors import PeerLostError
from paceline.update.server.context import ServiceContext
from paceline.update.server.failures import GOODBYE_S, Failures
from paceline.update.server.frames import FrameKind
from paceline.update.server.ledger_client import SocketLedgerClient
from paceline.update.server.membership import LOOK_EVERY_S
from paceline.update.server.peers import Peers


class Barriers:
    """Where workers wait for each other.

    Args:
        context: of the service.
        peers: the connections.
        failures: told about workers that do not come.
        ledger_client: told about workers that have no more to push.

    Attributes:
        parted: whether every worker has the final model.
    """

    def __init__(
        self, context: ServiceContext, peers: Peers, failures: Failures, ledger_client: SocketLedgerClient
    ) -> None:
        self._context, self._members = context, context.membership
        self._peers, self._failures, self._ledger_client = peers, failures, ledger_client
        self._settled = 0  # how often all have waited for all
        self._lost_at_pull = 0  # how many were lost when the final model was pulled
        self.parted = False

    def settle(self) -> None:
        """Wait until every worker is here, with nothing under way."""
        self._settled += 1
        self._announce(FrameKind.HERE, self._settled)
        began = time.monotonic()
        while True:
            self._context.check()
            if self._members.lost:
                raise PeerLostError(
                    self._context.sign(
                        f"{self._context.names(sorted(self._members.lost))} left, and workers can no longer "
                        "come to one point together, which a checkpoint needs; start again from the last one"
                    )
                )
            missing = self._missing(lambda rank: self._members.here.get(rank, 0) >= self._settled, remind=True)
            if not missing:
                return
            self._failures.give_up_silent(missing, "did not come to a point where all wait for all", began)

    def finish(self) -> None:
        """Say that this worker has no more to push, and wait for the others."""
        self._announce(FrameKind.FINISH, self._lost_at_pull)
        self._wait_for(lambda rank: rank in self._members.finished, "made no step")
        self._lost_at_pull = len(self._members.lost)

    def part(self) -> bool:
        """Say that this worker has the final model, and wait until all have.

        False: somebody was lost meanwhile, and what this worker has pulled from it may not be what others pull from the
        new owner; it has to pull again.
        """
        if len(self._members.lost) == self._lost_at_pull:
            self._announce(FrameKind.BYE, self._lost_at_pull)
            self._wait_for(self._has_parted, "took no leave")
        if len(self._members.lost) != self._lost_at_pull:
            self._lost_at_pull = len(self._members.lost)
            return False
        self.parted = True
        for rank in self._members.live:
            self._peers[rank].flush(GOODBYE_S)
        return True

    def arrived(self, rank: int, kind: int, number: int) -> None:
        """Worker `rank` has no more to push, has the final model, or waits for all."""
        with self._context.changed:
            if kind == FrameKind.HERE:
                self._members.here[rank] = number
            elif kind == FrameKind.FINISH:
                self._members.finished.add(rank)
            else:
                self._members.parted[rank] = number
            if kind != FrameKind.HERE:
                self._context.server.leave(rank)
                self._ledger_client.finished(rank)
            self._context.changed.notify_all()

    def _has_parted(self, rank: int) -> bool:
        """Whether nobody has to wait for `rank`; nor for any worker once another one was lost."""
        lost_another = len(self._members.lost) != self._lost_at_pull
        return lost_another or self._members.parted.get(rank) == self._lost_at_pull

    def _announce(self, kind: FrameKind, number: int) -> None:
        with self._context.changed:
            self.arrived(self._members.rank, kind, number)
            self._peers.say_all(kind, (number,))

    def _missing(self, ready: Callable[[int], bool], remind: bool = False) -> list[int]:
        """Live workers that are not ready, after a little wait for them."""
        with self._context.changed:
            missing = [rank for rank in self._members.live if not ready(rank)]
            if missing:
                self._context.changed.wait(LOOK_EVERY_S)
                if remind:
                    self._peers.remind()
            return missing

    def _wait_for(self, ready: Callable[[int], bool], what: str) -> None:
        """Wait until all who take part are ready; workers that are silent too long are given up."""
        began = time.monotonic()
        while True:
            self._context.check()
            missing = self._missing(ready)
            if not missing:
                return
            self._failures.give_up_silent(missing, what, began)

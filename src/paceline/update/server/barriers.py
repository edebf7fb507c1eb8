# SPDX-License-Identifier: Apache-2.0
"""Barriers of all workers: at checkpoints, at the end of the work, and at the end of the run."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core import runtime
from paceline.errors import PeerLostError
from paceline.update.server.context import ServiceContext
from paceline.update.server.failures import GOODBYE_S, Failures
from paceline.update.server.frames import FrameKind
from paceline.update.server.ledger_client import SocketLedgerClient
from paceline.update.server.membership import LOOK_EVERY_S
from paceline.update.server.peer import Peers


class Barriers:
    """The barriers of a service.

    Attributes:
        all_have_final_model: whether every worker has the final model.
    """

    def __init__(
        self, context: ServiceContext, peers: Peers, failures: Failures, ledger_client: SocketLedgerClient
    ) -> None:
        self._context, self._members = context, context.membership
        self._peers, self._failures, self._ledger_client = peers, failures, ledger_client
        self._barriers = 0  # made so far
        self._lost_at_pull = 0  # how many workers were lost when the final model was pulled
        self.all_have_final_model = False

    def barrier(self, of_all: bool = True) -> None:
        """Wait until every worker is here, with no exchange under way.

        Args:
            of_all: whether a lost worker is missed, too; else the living ones meet.

        Raises:
            PeerLostError: a worker that is missed is lost.
        """
        self._barriers += 1
        self._announce(FrameKind.HERE, self._barriers)
        began = runtime.monotonic()
        while True:
            self._context.check()
            if of_all and self._members.lost:
                world = self._context.world
                raise PeerLostError(
                    world.sign(
                        f"{world.names(sorted(self._members.lost))} left, and workers can no longer "
                        "come to one point together, which a checkpoint needs; start again from the last one"
                    )
                )
            missing = self._missing(lambda rank: self._members.barriers.get(rank, 0) >= self._barriers, remind=True)
            if not missing:
                return
            self._failures.give_up_silent(missing, "did not come to a point where all wait for all", began)

    def finish(self) -> None:
        """Announce that this worker has no more to push, and wait until no worker has."""
        self._announce(FrameKind.FINISH, self._lost_at_pull)
        self._wait_for(lambda rank: rank in self._members.finished, "made no step")
        self._lost_at_pull = len(self._members.lost)

    def confirm_final_model(self) -> bool:
        """Announce that this worker has the final model, and wait until all workers have.

        False: a worker was lost since the pull, and its shards may differ from those that the new owner serves; this
        worker has to pull again, unless others have left with what it has.
        """
        if len(self._members.lost) == self._lost_at_pull:
            self._announce(FrameKind.BYE, self._lost_at_pull)
            self._wait_for(self._confirmed, "took no leave")
        if len(self._members.lost) != self._lost_at_pull and not self._model_is_taken():
            self._lost_at_pull = len(self._members.lost)
            return False
        self.all_have_final_model = True
        for rank in self._members.live:
            self._peers[rank].flush(GOODBYE_S)
        return True

    def arrived(self, rank: int, kind: int, number: int) -> None:
        """Note what worker `rank` announced."""
        with self._context.changed:
            if kind == FrameKind.HERE:
                self._members.barriers[rank] = number
            elif kind == FrameKind.FINISH:
                self._members.finished.add(rank)
            else:
                self._members.confirmed[rank] = number
            if kind != FrameKind.HERE:
                self._context.server.leave(rank)
                self._ledger_client.lost(rank)
            self._context.news()

    def _model_is_taken(self) -> bool:
        """Whether a worker has left with the model that this one has pulled: nobody serves its shards any more."""
        return any(self._members.confirmed[rank] == self._lost_at_pull for rank in self._members.left)

    def _confirmed(self, rank: int) -> bool:
        """Whether no wait for `rank` is needed: it has the model, or a loss makes all workers pull again."""
        lost_another = len(self._members.lost) != self._lost_at_pull
        return lost_another or self._members.confirmed.get(rank) == self._lost_at_pull

    def _announce(self, kind: FrameKind, number: int) -> None:
        with self._context.changed:
            self.arrived(self._members.rank, kind, number)
            self._peers.say_all(kind, (number,))

    def _missing(self, ready: Callable[[int], bool], remind: bool = False) -> list[int]:
        """Live workers that are not ready, after a short wait for them."""
        with self._context.changed:
            missing = [rank for rank in self._members.live if not ready(rank)]
            if missing:
                self._context.changed.wait(LOOK_EVERY_S)
                if remind:
                    self._peers.remind()
            return missing

    def _wait_for(self, ready: Callable[[int], bool], what: str) -> None:
        """Wait until all live workers are ready; declare workers that are silent for too long lost."""
        began = runtime.monotonic()
        while True:
            self._context.check()
            missing = self._missing(ready)
            if not missing:
                return
            self._failures.give_up_silent(missing, what, began)

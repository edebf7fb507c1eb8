# SPDX-License-Identifier: Apache-2.0
"""Leases of data under an asynchronous rule: the owner of the first shard keeps the ledger, the others ask it.

Places are done when every shard has the push that they went into, at its owner and at its successor: their worker says
so then. So what a lost worker had pushed to some owners only is done once more, and the shards that have it pass it
over (:mod:`.push_numbers`). A worker that has nothing left to do first makes all of its pushes safe. Then it asks again
and again: the answer is work that somebody lost has left, or that the epoch is over for everybody.

When the keeper is lost, the owner of its shard keeps the ledger, as old as what it was told last. It leases nothing
before every worker that lives has said what it holds; all else that is not done is free. What of it is in the shards
already is passed over there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from paceline.communication.sockets.channel import Channel, Frame
from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.data.ledger.ledger import Ledger
from paceline.data.ledger.ranges import Ranges
from paceline.update.server.context import ServiceContext
from paceline.update.server.durability import Durability
from paceline.update.server.failures import Failures
from paceline.update.server.frames import FrameKind
from paceline.update.server.peers import Peers
from paceline.update.server.shard import LEDGER_SHARD

ASK_AGAIN_S = (0.002, 0.05)
"""How long a worker that has nothing to do waits before it asks again: at first, and at most."""


class LeaseAnswer(IntEnum):
    """The ledger has nothing at present, gives a lease, or is done with the epoch for all workers."""

    NOTHING = 0
    WORK = 1
    OVER = 2


@dataclass(frozen=True)
class DataAccess:
    """What a worker's ledger client needs of its data.

    Attributes:
        ledger: this worker's; of use once it owns the first shard.
        holding: gives the places that this worker holds and has not pushed.
        push_rest: pushes what this worker has made and not pushed.
        bounded: whether others wait for this worker's clock.
    """

    ledger: Ledger
    holding: Callable[[], list[Mark]] = list
    push_rest: Callable[[], None] = lambda: None
    bounded: bool = False


class SocketLedgerClient:
    """A worker's way to the ledger, and the ledger where this worker keeps it.

    Args:
        context: of the service.
        peers: the connections.
        failures: told about workers that hold data and do nothing with it.
        durability: of this worker's pushes.
        data: where places come from and go.
    """

    def __init__(
        self, context: ServiceContext, peers: Peers, failures: Failures, durability: Durability, data: DataAccess
    ) -> None:
        self._context, self._peers, self._failures, self._durability = context, peers, failures, durability
        self._data, self._ledger = data, data.ledger
        self.resting = False  # whether nobody is to wait for this worker's clock
        self._numbers = 0
        self._answers: dict[int, tuple[int, ...]] = {}
        self._question: tuple[int, Question] | None = None
        self._unheard: set[int] = set()  # whose leases a new keeper does not know yet
        self._report_due = False
        self._kept_since = 0.0  # when this worker became the keeper

    @property
    def _keeper(self) -> int:
        return self._context.membership.owners[LEDGER_SHARD]

    @property
    def _keeps(self) -> bool:
        return self._keeper == self._context.membership.rank

    # -- asking: the training thread --------------------------------------------------------------

    def ask(self, question: Question) -> Mark | None:
        """A lease; None where there is none, and with `dry` only when the epoch is over for everybody."""
        pause, longest = ASK_AGAIN_S
        first = replace(question, dry=False)
        while True:
            self.report()
            kind, *mark = self._inquire(first)
            if kind == LeaseAnswer.WORK:
                loader, epoch, begin, end = mark[:4]
                return loader, epoch, begin, end
            if kind == LeaseAnswer.OVER or not question.dry:
                return None
            if first is question:
                self._peers.pause(pause)
                pause = min(longest, 2 * pause)
            else:  # with nothing to lose it may say that it waits
                self._data.push_rest()
                self.secure()
                first = question

    def _inquire(self, question: Question) -> tuple[int, ...]:
        """Ask, and wait for the answer; a new keeper is asked anew."""
        self._numbers += 1
        self._question = (self._numbers, question)
        with self._context.changed:
            self._send_question()
        try:
            self._peers.wait_until(lambda: self._numbers in self._answers)
            return self._answers.pop(self._numbers)
        finally:
            self._question = None

    def _send_question(self) -> None:
        assert self._question is not None
        number, q = self._question
        numbers = (number, q.loader, q.epoch, q.total, q.unit, q.most, int(q.dry))
        self._peers[self._keeper].inquire(FrameKind.LEASE, numbers)

    def answered(self, numbers: tuple[int, ...]) -> None:
        """An answer of the keeper has come."""
        with self._context.changed:
            if self._question is not None and self._question[0] == numbers[0]:
                self._answers[numbers[0]] = numbers[1:]
                self._context.changed.notify_all()

    def rest(self) -> None:
        """Nobody is to wait for this worker's clock while it has nothing to do."""
        if self._data.bounded and not self.resting:
            self.resting = True
            self._peers[self._context.membership.rank].say(FrameKind.REST, ())
            self._peers.say_all(FrameKind.REST, ())

    def secure(self, rests: bool = True) -> None:
        """Wait until no push of this worker can be lost with one owner.

        Args:
            rests: whether other workers need not wait for this worker's clock until its next push.
        """
        if rests:
            self.rest()
        self._durability.secure()

    def rest_again(self) -> None:
        """A new owner of shards does not know yet that this worker rests."""
        if self.resting:
            self.resting = False
            self.rest()

    def leave_early(self, loader: int, epoch: int, marks: list[Mark]) -> None:
        """This worker ends its pass before the epoch is over; it will not do these places of its leases."""
        self._tell(FrameKind.LEFT, (loader, epoch), [list(mark) for mark in marks])

    def ends(self, loader: int, epoch: int, total: int) -> None:
        """The loader turned out to have only so many places in this epoch."""
        self._tell(FrameKind.ENDS, (loader, epoch, total), None)

    def learn(self, news: Any) -> None:
        """What is done of the data, as the keeper knew when it gave the values that are taken now."""
        with self._ledger.lock:
            if not self._keeps:
                self._ledger.learn(news)

    def done(self, marks: list[Mark]) -> None:
        """What was made of these places is in every shard for good, or is for none."""
        if marks:
            self._tell(FrameKind.DONE, (), [list(mark) for mark in marks])

    def waits(self, now: bool) -> None:
        """Whether this worker waits for the others, as at a checkpoint: its places are not to be waited for."""
        self._tell(FrameKind.WAITS, (int(now),), None)

    def _tell(self, kind: FrameKind, numbers: tuple[int, ...], note: Any) -> None:
        if not self._context.closing:
            self._peers[self._keeper].say(kind, numbers, None, note)

    def report(self) -> None:
        """Tell a new keeper what this worker holds."""
        if self._report_due:
            self._report_due = False
            held = [*self._durability.marks, *self._data.holding()]
            self._tell(FrameKind.HOLDS, (), [list(mark) for mark in held])

    # -- keeping: the threads that serve ----------------------------------------------------------

    def handle(self, rank: int, channel: Channel | None, frame: Frame) -> None:
        """What worker `rank` says to the keeper; without a channel it is this worker itself."""
        numbers = frame.numbers
        if frame.kind == FrameKind.LEASE:
            answer = (numbers[0], *self._lease(rank, numbers))
            if channel is None:
                self.answered(answer)
            else:
                self._context.send(channel, FrameKind.LEASED, answer)
            return
        with self._ledger.lock:
            if frame.kind == FrameKind.LEFT:
                self._ledger.leave_early(rank, numbers[0], numbers[1], frame.note or ())
            elif frame.kind == FrameKind.ENDS:
                self._ledger.ends(*numbers[:3])
            elif frame.kind == FrameKind.DONE:
                self._ledger.done(rank, frame.note or ())
            elif frame.kind == FrameKind.WAITS:
                self._ledger.waits(rank, bool(numbers[0]))
            elif frame.kind == FrameKind.HOLDS:
                self._ledger.holds(rank, frame.note or ())
                self._unheard.discard(rank)

    def _lease(self, rank: int, numbers: tuple[int, ...]) -> tuple[int, ...]:
        _, loader, epoch, total, unit, most, dry = numbers[:7]
        question = Question(loader, epoch, total, unit, most, bool(dry))
        with self._ledger.lock:
            unheard = sorted(self._unheard)
        self._failures.give_up_silent(unheard, "did not say what data it holds", self._kept_since)
        with self._ledger.lock:
            if self._unheard or not self._keeps:
                return (LeaseAnswer.NOTHING,)
            mark = self._ledger.ask(rank, question, time.monotonic())
            if mark is not None:
                return LeaseAnswer.WORK, *mark
            if self._ledger.over(loader, epoch):
                return (LeaseAnswer.OVER,)
            holders = self._ledger.holders(loader, epoch)
        if dry:
            self._failures.give_up_silent(holders, "made no step with the data that it holds", 0.0)
        return (LeaseAnswer.NOTHING,)

    # -- who is lost ------------------------------------------------------------------------------

    def lost(self, rank: int, kept: bool) -> None:
        """Worker `rank` is gone; `kept` tells whether it kept the ledger."""
        with self._ledger.lock:
            self._unheard.discard(rank)
            self._ledger.lost(rank)
            if kept and self._keeps:
                self._ledger.forget_leases()
                members = self._context.membership
                self._unheard, self._kept_since = set(members.live) - members.finished, time.monotonic()
        if kept:
            self._report_due = True
            if self._question is not None:
                self._send_question()

    def finished(self, rank: int) -> None:
        """Worker `rank` has no more to push."""
        with self._ledger.lock:
            self._unheard.discard(rank)
            self._ledger.lost(rank)

    # -- checkpoints ------------------------------------------------------------------------------

    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        """When this epoch begins, only these places are to be done."""
        with self._ledger.lock:
            self._ledger.expect(loader, epoch, rest)

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint holds of the ledger; None on workers that do not keep it."""
        with self._ledger.lock:
            return self._ledger.state(time.monotonic()) if self._keeps else None

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        with self._ledger.lock:
            self._ledger.load(state, time.monotonic())

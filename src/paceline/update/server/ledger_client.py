# SPDX-License-Identifier: Apache-2.0
"""Leases of samples under an asynchronous rule: the owner of the first shard keeps the ledger, and workers ask it.

Samples are done when every shard has the push that they went into, at its owner and at its successor; their worker
reports that. So samples that a lost worker had pushed to some owners only are leased again, and the shards that have
them skip them (:mod:`.shard`). An idle worker first makes all of its pushes safe. Then it polls the ledger: the answer
is work that a lost worker left, or that the epoch is over for all workers.

When the keeper of the ledger is lost, the new owner of its shard keeps the ledger, at the state that it last knew. It
leases nothing before every live worker has reported which samples it holds; all other samples that are not done are
free. The shards skip those that they already have.

Pushes that only some shards have: the last push of a lost worker may be in some shards only, and nobody else has its
values. Its samples are leased again, and the shards that have them skip them. A shard can skip only a whole push. So a
push must not mix such samples with others: their leases hold nothing else, and each minibatch of them is pushed alone.

Which samples these are, their owners say, when the lost worker's pushes can reach no shard any more. So after a loss

1. every worker tells every other one of it, and takes no push of the lost worker from then on;
2. when a worker has heard that from all others, it tells the keeper of the ledger which samples are in its shards. What
   the others had said until then, and to a keeper that is lost, is in these shards, or its samples are still held;
3. the keeper leases nothing until all have done so.

It is the flush of virtual synchrony (K. Birman and T. Joseph, SOSP 1987), for the samples only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from paceline.communication.sockets.channel import Channel, Frame
from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Leases, Mark, Question, by_epoch
from paceline.data.ledger.ledger import Ledger
from paceline.data.ledger.ranges import Ranges
from paceline.update.server.durability import Durability
from paceline.update.server.membership import Failures, ServiceContext
from paceline.update.server.peer import Peers
from paceline.update.server.protocol import FrameKind
from paceline.update.server.shard import LEDGER_SHARD


class PartialPushes:
    """What the living workers say after a loss."""

    def __init__(self, context: ServiceContext, peers: Peers, ledger: Ledger) -> None:
        self._context, self._peers, self._ledger = context, peers, ledger  # the ledger is used at the keeper
        self._heard: defaultdict[int, set[int]] = defaultdict(set)  # worker -> the losses that it told this one of
        self._reported: defaultdict[int, set[int]] = defaultdict(set)  # owner -> the losses before its last report

    def told(self, sender: int, rank: int) -> None:
        """Worker `sender` has said that `rank` is lost."""
        with self._context.changed:
            self._heard[sender].add(rank)
            self.report()

    def report(self) -> None:
        """Tell the keeper which samples are in this worker's shards, if all know of all losses; `changed` is held."""
        members = self._context.membership
        lost, others = set(members.lost), [rank for rank in members.live if rank != members.rank]
        if lost and all(self._heard[rank] >= lost for rank in others):
            shards = list(self._context.server.shards.values())
            samples = by_epoch(mark for shard in shards for mark in shard.marks())
            marks = [[*key, begin, end] for key, places in samples.items() for begin, end in places]
            self._peers[members.owners[LEDGER_SHARD]].say(FrameKind.COVERS, (), note=[sorted(lost), *marks])

    # -- the keeper, under the ledger's lock --------------------------------------------------------

    def reported(self, owner: int, note: Sequence[Sequence[int]]) -> None:
        self._ledger.pushed(note[1:])
        self._reported[owner] = set(note[0])

    @property
    def known(self) -> bool:
        """Whether all owners have reported since the last loss."""
        members = self._context.membership
        lost = set(members.lost)
        return all(self._reported[rank] >= lost for rank in members.live)


class PushedAlone:
    """The leases of this worker that are pushed alone."""

    def __init__(self, push_rest: Callable[[], None]) -> None:
        self._push_rest = push_rest
        self._leased: defaultdict[tuple[int, int], Ranges] = defaultdict(Ranges)
        self._before = False

    def leased(self, mark: Mark) -> None:
        """Each minibatch of these places is pushed alone."""
        self._leased[mark[:2]].add(*mark[2:])

    def hand_out(self, marks: Sequence[Mark]) -> None:
        alone = sum(self._leased[loader, epoch].remove(begin, end) for loader, epoch, begin, end in marks) > 0
        if alone or self._before:
            self._push_rest()
        self._before = alone


ASK_AGAIN_S = (0.002, 0.05)
"""How long an idle worker waits before it asks again: at first, and at most."""


class LeaseAnswer(IntEnum):
    """The ledger has no work at present, gives a lease, or the epoch is over for all workers."""

    NOTHING = 0
    WORK = 1
    OVER = 2


@dataclass(frozen=True)
class DataAccess:
    """What a worker's ledger client needs of its data."""

    ledger: Ledger  # this worker's; used once it owns the first shard
    holding: Callable[[], list[Mark]] = list  # gives the sample ranges that this worker holds and has not pushed
    push_rest: Callable[[], None] = lambda: None  # pushes all work that is not pushed
    bounded: bool = False  # whether other workers wait for this worker's clock
    # whether what a shard skips stays in the worker, which pushes its parameters again and again
    pushes_parameters: bool = False
    clients: int = 1  # how many clients push what they made of the same samples


class SocketLedgerClient(Leases):
    """A worker's connection to the ledger, and the ledger itself where this worker keeps it."""

    def __init__(
        self, context: ServiceContext, peers: Peers, failures: Failures, durability: Durability, data: DataAccess
    ) -> None:
        self._context, self._peers, self._failures, self._durability = context, peers, failures, durability
        self._data, self._ledger = data, data.ledger
        self.idle = False  # whether other workers need not wait for this worker's clock
        self.partial, self._alone = PartialPushes(context, peers, data.ledger), PushedAlone(data.push_rest)
        self._numbers = 0
        self._answers: dict[int, tuple[int, ...]] = {}
        self._question: tuple[int, Question] | None = None
        self._unreported: set[int] = set()  # workers whose leases a new keeper does not know yet
        self._report_due = self._warned = False
        self._keeper_since = 0.0

    @property
    def _keeper(self) -> int:
        return self._context.membership.owners[LEDGER_SHARD]

    @property
    def _keeps(self) -> bool:
        return self._keeper == self._context.membership.rank

    # -- asking: the training thread --------------------------------------------------------------

    def ask(self, question: Question) -> Mark | None:
        pause, longest = ASK_AGAIN_S
        first = replace(question, dry=False)
        while True:
            self.report()
            kind, *mark = self._inquire(first)
            if kind == LeaseAnswer.WORK:
                loader, epoch, begin, end, again = mark[:5]
                if again:
                    self._alone.leased((loader, epoch, begin, end))
                    if self._data.pushes_parameters:  # which have learnt from them again, though shards skip the push
                        self._context.reports.inexact(
                            f"places {begin} to {end - 1} of pass {epoch} are trained on again after a loss, and "
                            "parameters are pushed, so that slices which have them get them twice (said once, the "
                            "event log has all)",
                            warns=not self._warned,
                        )
                        self._warned = True
                return loader, epoch, begin, end
            if kind == LeaseAnswer.OVER or not question.dry:
                return None
            if first is question:
                self._peers.pause(pause)
                pause = min(longest, 2 * pause)
            else:  # `dry` tells other workers not to wait for it: push everything before
                self._data.push_rest()
                self.secure()
                first = question

    def _inquire(self, question: Question) -> tuple[int, ...]:
        """Ask, and wait for the answer; `lost` asks a new keeper again."""
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
        with self._context.changed:
            if self._question is not None and self._question[0] == numbers[0]:
                self._answers[numbers[0]] = numbers[1:]
                self._context.changed.notify_all()

    def _announce_idle(self) -> None:
        """Tell all owners not to wait for this worker's clock until its next push."""
        if self._data.bounded and not self.idle:
            self.idle = True
            self._peers[self._context.membership.rank].say(FrameKind.IDLE, ())
            self._peers.say_all(FrameKind.IDLE, ())

    def secure(self, idle: bool = True) -> None:
        """Wait until no push of this worker can be lost with one owner; if `idle`, other workers need not wait for its
        clock until its next push."""
        if idle:
            self._announce_idle()
        self._durability.secure()

    def idle_again(self) -> None:
        """Tell a new owner of shards as well that this worker is idle."""
        if self.idle:
            self.idle = False
            self._announce_idle()

    def hand_out(self, marks: list[Mark]) -> None:
        self._alone.hand_out(marks)

    def leave_early(self, loader: int, epoch: int, marks: list[Mark]) -> None:
        self._tell(FrameKind.LEFT, (loader, epoch), [list(mark) for mark in marks])

    def ends(self, loader: int, epoch: int, total: int) -> None:
        self._tell(FrameKind.ENDS, (loader, epoch, total), None)

    def learn(self, news: Any) -> None:
        """Note which samples are done: those that the keeper knew of when it sent the values that are taken now."""
        with self._ledger.lock:
            if not self._keeps:
                self._ledger.learn(news)

    def done(self, marks: list[Mark]) -> None:
        if marks:
            self._tell(FrameKind.DONE, (), [list(mark) for mark in marks])

    def waits(self, now: bool) -> None:
        self._tell(FrameKind.WAITS, (int(now),), None)

    def _tell(self, kind: FrameKind, numbers: tuple[int, ...], note: Any) -> None:
        if not self._context.closed.is_set():
            self._peers[self._keeper].say(kind, numbers, None, note)

    def report(self) -> None:
        """Tell a new keeper which samples this worker holds."""
        if self._report_due:
            self._report_due = False
            held = [*self._durability.kept.marks, *self._data.holding()]
            self._tell(FrameKind.HOLDS, (), [list(mark) for mark in held])

    # -- keeping: the threads that serve ----------------------------------------------------------

    def handle(self, rank: int, channel: Channel | None, frame: Frame) -> None:
        """Handle a frame to the keeper of the ledger; without a channel `rank` is this worker itself."""
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
                self._unreported.discard(rank)
            elif frame.kind == FrameKind.COVERS:
                self.partial.reported(rank, frame.note)

    def _lease(self, rank: int, numbers: tuple[int, ...]) -> tuple[int, ...]:
        _, loader, epoch, total, unit, most, dry = numbers[:7]
        question = Question(loader, epoch, total, unit, most, bool(dry))
        with self._ledger.lock:
            unreported = sorted(self._unreported)
        self._failures.give_up_silent(unreported, "did not say what data it holds", self._keeper_since)
        with self._ledger.lock:
            if self._unreported or not self._keeps or not self.partial.known:
                return (LeaseAnswer.NOTHING,)
            mark = self._ledger.ask(rank, question, runtime.monotonic())
            if mark is not None:
                return LeaseAnswer.WORK, *mark, int(self._ledger.is_pushed(mark))
            if self._ledger.over(loader, epoch):
                return (LeaseAnswer.OVER,)
            holders = self._ledger.holders(loader, epoch)
        if dry:
            self._failures.give_up_silent(holders, "made no step with the data that it holds", 0.0)
        return (LeaseAnswer.NOTHING,)

    # -- losses ----------------------------------------------------------------------------------

    def lost(self, rank: int, kept: bool = False) -> None:
        """Free the leases of worker `rank`, which is lost or done; `kept`: whether it was the keeper of the ledger."""
        with self._ledger.lock:
            self._unreported.discard(rank)
            self._ledger.lost(rank)
            if kept and self._keeps:
                self._ledger.forget_leases()
                members = self._context.membership
                self._unreported, self._keeper_since = set(members.live) - members.finished, runtime.monotonic()
        if kept:
            self._report_due = True
            if self._question is not None:
                self._send_question()
        self.partial.report()

    # -- checkpoints ------------------------------------------------------------------------------

    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        with self._ledger.lock:
            self._ledger.epochs.expect(loader, epoch, rest)

    def state(self) -> dict[str, Any] | None:
        with self._ledger.lock:
            return self._ledger.state(runtime.monotonic()) if self._keeps else None

    def load(self, state: dict[str, Any]) -> None:
        with self._ledger.lock:
            self._ledger.load(state, runtime.monotonic())

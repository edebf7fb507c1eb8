# SPDX-License-Identifier: Apache-2.0
"""An exchange that is repeated until all live members have the complete result.

A worker keeps its contribution until the control plane commits the exchange. Nothing is applied before the commit: a
sum that reached only some workers would leave them with different models. The places of the data that went into it are
done with its commit, too; the control plane keeps their ledger.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.data.ledger.epoch_ledger import Leases, Mark, Question
from paceline.data.ledger.ranges import Ranges
from paceline.errors import CheckpointError, DesyncError, MismatchError, PeerLostError
from paceline.flow.control.client import ControlClient
from paceline.flow.control.messages import Generation
from paceline.flow.membership import CommitReport, ElasticMembership
from paceline.rules.codec import State
from paceline.rules.rule import Rule
from paceline.tuning.tuner import GatheredRequests, Tuner
from paceline.update.exchange.exchanger import (
    Chunk,
    ExchangeHeader,
    Exchanger,
    ExchangeSummary,
    PendingHeader,
    Reports,
    StartedExchange,
    refuse_nothing,
)
from paceline.update.exchange.pipeline import Running

Total = tuple[Tensor, State]


class CommittingExchanger(Exchanger):
    """Makes exchanges among changing members."""

    keeps = True

    def __init__(
        self,
        membership: ElasticMembership,
        rule: Rule,
        tuner: Tuner,
        report: Callable[[ExchangeSummary], CommitReport],  # gives what an exchange reports to the control plane
    ) -> None:
        self.membership, self._rule, self.tuner, self.report = membership, rule, tuner, report
        self.sent, self.wire_s = 0, 0.0  # bytes of the last exchange, and its seconds once all members had come to it
        self._connect()

    def _connect(self) -> None:
        reports = Reports(asks=lambda: self.tuner.asks)
        super().__init__(self.membership.transport, self._rule.codec, self._rule.common, reports=reports)

    def renew(self) -> None:
        """The members have changed."""
        self.pipeline.close()
        self._connect()

    def follow(self, rule: Rule) -> None:
        """Continue with the codec of a rule, between two exchanges."""
        if rule.codec != self.codec:
            self._rule = rule
            self.renew()

    def pre_vote(self, header: ExchangeHeader) -> ExchangeHeader:
        """The outcome is known after commit; the exchange may be retried."""
        return header

    def start(
        self,
        header: ExchangeHeader,
        chunks: Sequence[Chunk],
        number: int,
        checksum: Callable[[], int],
        overlapped: bool = False,
    ) -> StartedExchange:
        return CommittedExchange(self, header, chunks, number, checksum)


class CommittedExchange:
    """One exchange among members that may change during it."""

    def __init__(
        self,
        exchanger: CommittingExchanger,
        header: ExchangeHeader,  # this worker's
        chunks: Sequence[Chunk],
        number: int,  # counts the exchanges of these chunks
        checksum: Callable[[], int],  # of the common state for the header, when the members have changed
    ) -> None:
        self._exchanger, self._membership = exchanger, exchanger.membership
        self._header, self._number, self._checksum = header, number, checksum
        self._chunks = list(chunks)
        factor = header.factor if header.brings else 0.0
        self._given = [chunk.fill(factor) for chunk in self._chunks]
        self._generation = self._membership.generation.number
        self._pending_header: PendingHeader | None = None
        self._running: list[Running] = []
        self._arrived: tuple[ExchangeSummary, Sequence[Total]] | None = None
        self._heard: GatheredRequests | None = None
        self._sent_before = 0
        self._membership.control.starts(self._membership.exchange)

    def _begin(self) -> None:
        """Start it among the present members."""
        membership = self._membership
        membership.follow_control()
        if membership.generation.number != self._generation:
            self._generation = membership.generation.number
            self._header = replace(self._header, checksum=self._checksum())
            membership.control.starts(membership.exchange)
        self._sent_before = self._exchanger.transport.bytes_sent
        self._pending_header = self._exchanger.open(self._header)
        if self._header.brings or not self._pending_header.summary().empty:
            counts = self._counts
            self._running = [
                self._exchanger.begin(
                    chunk, given.clone() if counts or chunk.from_rank_0 else torch.zeros_like(given), self._number
                )
                for chunk, given in zip(self._chunks, self._given, strict=True)
            ]

    @property
    def _counts(self) -> bool:
        """Whether the contribution goes into the mean: the exchange may drop an outlier."""
        assert self._pending_header is not None
        if self._header.usual:
            return True
        return self._pending_header.summary().headers[self._membership.transport.world.rank].factor > 0

    @property
    def headers(self) -> tuple[ExchangeHeader, ...]:
        """The headers of all members, in rank order; makes the exchange if needed."""
        return self._arrive()[0].headers

    def arrive(self) -> list[State]:
        """Wait for all chunks; returns each chunk's new state."""
        return [state for _, state in self._arrive()[1]]

    def _arrive(self) -> tuple[ExchangeSummary, Sequence[Total]]:
        while self._arrived is None:
            try:
                if self._pending_header is None:
                    self._begin()
                assert self._pending_header is not None
                summary, there = self._pending_header.summary(), time.perf_counter()
                totals: Sequence[Total] = [running.finish() for running in self._running]
                self._exchanger.wire_s = time.perf_counter() - there
                self._exchanger.sent = self._exchanger.transport.bytes_sent - self._sent_before
                if summary.asked:
                    self._heard = self._exchanger.tuner.gather(self._membership.transport)
                self._arrived = summary, totals
            except PeerLostError as error:
                self._again()
                self._membership.renew(self._membership.failed(error))
        return self._arrived

    def _again(self) -> None:
        self._pending_header, self._running, self._arrived, self._heard = None, [], None, None

    def finish(self, made: int = 0) -> ExchangeSummary:
        """Apply it after its commit.

        Raises:
            DesyncError, MismatchError, NonFiniteError: on every worker, with nothing applied.
            GivenUpError: the run continues without this worker.
        """
        follows: Generation | None = None
        while follows is None:
            try:
                summary, totals = self._arrive()
            except (DesyncError, MismatchError) as error:
                self._membership.control.doing(f"ends with {type(error).__name__}", self._header.total)
                raise
            asked = self._exchanger.transport.now()
            follows = self._membership.commit(self._exchanger.report(summary))
            self._exchanger.waited(asked)
            if follows is None:
                self._again()
        self._membership.applying.acquire()  # the engine releases it when everything is applied
        if summary.weight > 0:
            for chunk, (total, state) in zip(self._chunks, totals, strict=True):
                chunk.keep(state)
                chunk.land(total, summary)
        if self._heard is not None:
            self._exchanger.tuner.decide(self._heard)
        self._membership.applied = self._membership.exchange
        self._membership.follows = follows
        refuse_nothing(summary, self._exchanger.transport.world)
        return summary


class UncommittedPlaces:
    """Places of the data by the step that used them, until an exchange with that step is committed."""

    def __init__(self) -> None:
        self._by_step: deque[tuple[int, list[Mark]]] = deque()

    def add(self, step: int, marks: list[Mark]) -> None:
        """A step has used these places."""
        self._by_step.append((step, marks))

    def drop(self, committed: int) -> None:
        """The first `committed` steps are in the global model, or their places were given back."""
        while self._by_step and self._by_step[0][0] <= committed:
            self._by_step.popleft()

    def of_exchange(self, own: ExchangeHeader, committed: int) -> tuple[list[Mark], list[Mark], dict[str, Any]]:
        """The marks of an exchange for the ledger, from this worker's header and its steps that are committed with it.

        Returns:
            The places whose work enters the global model; those whose work was rejected, so that another worker uses
            them; facts for the status.
        """
        marks = [mark for step, some in self._by_step if step <= committed for mark in some]
        facts = {"minibatches": own.minibatches, "total": own.total}
        return ([], marks, facts) if own.brings and own.factor == 0 else (marks, [], facts)


LOOK_EVERY_S = 0.2
"""How long a worker without data waits for news before it asks again, seconds."""


class ControlLedgerClient(Leases):
    """A worker's client of the data ledger.

    A worker without data left waits until the epoch is over for all workers, because live workers take over the data of
    a lost one. Meanwhile it joins exchanges with the work that it has. An exchange is committed as a whole, or not at
    all, and members wait for each other at every one; what remains of a checkpoint's epoch they report by `expect`.
    """

    def __init__(self, control: ControlClient, join: Callable[[], None], applied: Callable[[], int]) -> None:
        self._control, self._join = control, join  # `join`: the exchange to which this worker is called, if any
        self._applied = applied  # the exchange whose state this worker's model has

    def ask(self, question: Question) -> Mark | None:
        while True:
            kind, mark = self._control.ask(question)
            if kind == "work":
                return mark
            if kind == "over" or not question.dry:
                return None
            self._join()
            self._control.wait_news(LOOK_EVERY_S)

    def leave_early(self, loader: int, epoch: int, marks: list[Mark]) -> None:
        self._control.tell("left", loader, epoch, [list(mark) for mark in marks])

    def ends(self, loader: int, epoch: int, total: int) -> None:
        self._control.tell("ends", loader, epoch, total)

    def done(self, marks: list[Mark]) -> None:
        if marks:
            self._control.tell("done", [list(mark) for mark in marks])

    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        self._control.tell("expect", loader, epoch, rest.state())

    def state(self) -> dict[str, Any] | None:
        """The ledger's state for a checkpoint.

        Raises:
            CheckpointError: ledger and model are of different exchanges.
        """
        exchange, ledger = self._control.ledger()
        if exchange != self._applied():
            raise CheckpointError(
                f"the ledger is that of exchange {exchange}, and the model that of exchange {self._applied()}"
            )
        return ledger

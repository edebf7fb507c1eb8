# SPDX-License-Identifier: Apache-2.0
"""An exchange that is repeated until all live members have the complete result.

A worker keeps its contribution until the control plane commits the exchange. Nothing is applied before the commit: a
sum that reached only some workers would leave them with different models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from paceline.errors import DesyncError, GivenUpError, MismatchError, PeerLostError
from paceline.flow.control.messages import Generation
from paceline.flow.membership import CommitReport, ElasticMembership
from paceline.rules.codec import State
from paceline.rules.rule import Rule
from paceline.tuning.tuner import GatheredRequests, Tuner
from paceline.update.exchange.exchanger import Chunk, Exchanger, PendingHeader, Reports, StartedExchange, refuse_nothing
from paceline.update.exchange.header import ExchangeHeader, ExchangeSummary, Timing
from paceline.update.exchange.pipeline import Running

Total = tuple[Tensor, State]


class CommittingExchanger(Exchanger):
    """Makes exchanges among changing members.

    Args:
        membership: the membership.
        rule: has the codec of the chunks, and the route over which they are summed.
        tuner: changes settings during the run.
        report: gives what an exchange reports to the control plane.

    Attributes:
        sent: bytes that the last exchange has sent.
        wire_s: seconds that it took once all members had come to it.
    """

    keeps = True

    def __init__(
        self,
        membership: ElasticMembership,
        rule: Rule,
        tuner: Tuner,
        report: Callable[[ExchangeSummary], CommitReport],
    ) -> None:
        self.membership, self._rule, self.tuner, self.report = membership, rule, tuner, report
        self.sent, self.wire_s = 0, 0.0
        self._connect()

    def _connect(self) -> None:
        reports = Reports(asks=lambda: self.tuner.asks)
        super().__init__(self.membership.transport, self._rule.codec, self._rule.common, reports=reports)

    def renew(self) -> None:
        """The members have changed."""
        self._pipeline.close()
        self._connect()

    def follow(self, rule: Rule) -> None:
        """Continue with the codec of a rule, between two exchanges."""
        if rule.codec != self.codec:
            self._rule = rule
            self.renew()

    def begin_timing(self) -> None:
        """An exchange is finished: count its time from now on."""
        self.timing = Timing()

    def spent(self, wait_s: float = 0.0, exchange_s: float = 0.0) -> None:
        """Count the time of the exchange under way: seconds of waiting, and beyond that."""
        self.timing = Timing(self.timing.wait_s + wait_s, self.timing.exchange_s + exchange_s)

    def pre_vote(self, header: ExchangeHeader) -> ExchangeHeader:
        """The outcome is known after commit; the exchange may be retried."""
        return header

    def start(
        self, header: ExchangeHeader, chunks: Sequence[Chunk], number: int, in_flight: int, checksum: Callable[[], int]
    ) -> StartedExchange:
        return CommittedExchange(self, header, chunks, number, checksum)


class CommittedExchange:
    """One exchange among members that may change during it.

    Args:
        exchanger: the connection.
        header: this worker's.
        chunks: the payload.
        number: counts the exchanges of this payload.
        checksum: gives the checksum of the common state for the header, when the members have changed.
    """

    def __init__(
        self,
        exchanger: CommittingExchanger,
        header: ExchangeHeader,
        chunks: Sequence[Chunk],
        number: int,
        checksum: Callable[[], int],
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
                self._exchanger.begin_with(chunk, given, self._number, counts)
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
            except GivenUpError:
                raise
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
        began = time.perf_counter()
        self._exchanger.begin_timing()
        follows: Generation | None = None
        while follows is None:
            try:
                summary, totals = self._arrive()
            except (DesyncError, MismatchError) as error:
                self._membership.control.doing(f"ends with {type(error).__name__}", self._header.total)
                raise
            asked = time.perf_counter()
            follows = self._membership.commit(self._exchanger.report(summary))
            self._exchanger.spent(wait_s=time.perf_counter() - asked)
            if follows is None:
                self._again()
        self._membership.applying.acquire()  # the engine releases it when everything is applied
        if summary.weight > 0:
            for chunk, (total, state) in zip(self._chunks, totals, strict=True):
                chunk.keep(state)
                chunk.land(total, summary)
        if self._heard is not None:
            self._exchanger.tuner.decide(self._heard)
        self._exchanger.spent(exchange_s=time.perf_counter() - began - self._exchanger.timing.wait_s)
        self._membership.applied = self._membership.exchange
        self._membership.follows = follows
        refuse_nothing(summary, self._exchanger.transport.world)
        return summary

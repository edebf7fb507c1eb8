# SPDX-License-Identifier: Apache-2.0
"""An exchange that is made until all who live have all of it.

What a worker contributes is kept until the control plane says that the exchange counts. Nothing is applied before: a
sum that reached some workers and not others would leave them with different models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.data.ledger.epoch_ledger import Mark
from paceline.errors import DesyncError, GivenUpError, MismatchError, PeerLostError
from paceline.flow.control import Generation
from paceline.rules.codec import Codec, State
from paceline.rules.topology import Topology
from paceline.tuning.tuner import Heard, Tuner
from paceline.update.exchange.agreement import refuse_nothing
from paceline.update.exchange.exchanger import Chunk, Exchanger, PendingHeader, StartedExchange
from paceline.update.exchange.header import ExchangeSummary, Header
from paceline.update.exchange.pipeline import Running

if TYPE_CHECKING:
    from paceline.flow.membership import Live

Total = tuple[Tensor, State]


class LiveExchanger(Exchanger):
    """Carries exchanges among members that change.

    Args:
        live: the membership.
        codec: how chunks are written.
        topology: over which route they are summed.

    Attributes:
        marks: gives the places of the data that enter the global model with the next exchange, those that were left
            out of it, and facts about it.
        tuner: what is asked for while the run goes on.
    """

    def __init__(self, live: Live, codec: Codec, topology: Topology) -> None:
        self._live, self._topology = live, topology
        super().__init__(live.transport, codec, topology)
        self.marks: Callable[[ExchangeSummary], tuple[list[Mark], list[Mark], dict[str, Any]]] = lambda summary: (
            [],
            [],
            {},
        )
        self.tuner: Tuner | None = None

    def renew(self) -> None:
        """The members are others."""
        self._pipeline.close()
        super().__init__(self._live.transport, self.codec, self._topology)
        self.asks = lambda: self.tuner is not None and self.tuner.asks

    def pre_vote(self, header: Header) -> Header:
        """What becomes of it is heard when the exchange is made, and perhaps made once more."""
        return header

    def start(
        self, header: Header, chunks: Sequence[Chunk], number: int, in_flight: int, checksum: Callable[[], int]
    ) -> StartedExchange:
        return Attempts(self._live, header, chunks, number, checksum)


class Attempts:
    """One exchange among members that may change while it is made.

    Args:
        live: the membership.
        header: this worker's.
        chunks: the payload.
        number: counts the exchanges of this payload.
        checksum: what the header is to say of the common state among other members.
    """

    def __init__(
        self, live: Live, header: Header, chunks: Sequence[Chunk], number: int, checksum: Callable[[], int]
    ) -> None:
        self._live, self._header, self._number, self._checksum = live, header, number, checksum
        self._chunks = list(chunks)
        factor = header.factor if header.brings else 0.0
        self._given = [chunk.fill(factor).clone() for chunk in self._chunks]  # sums are made in what is sent
        self._generation = live.generation.number
        self._pending_header: PendingHeader | None = None
        self._running: list[Running] = []
        self._arrived: tuple[ExchangeSummary, list[Total]] | None = None
        self._heard: Heard | None = None
        live.member.starts(live.exchange)

    def _begin(self) -> None:
        """Start it among the present members."""
        live = self._live
        if live.outdated:
            live.renew(live.member.generation)
        if live.generation.number != self._generation:
            self._generation = live.generation.number
            self._header = replace(self._header, checksum=self._checksum())
            live.member.starts(live.exchange)
        self._pending_header = live.exchanger.open(self._header)
        if self._header.brings or not self._pending_header.summary().empty:
            self._running = [
                live.exchanger.begin_with(chunk, self._part(given), self._number)
                for chunk, given in zip(self._chunks, self._given, strict=True)
            ]

    def _part(self, given: Tensor) -> Tensor:
        """What is sent: the contribution, or zeros where it is far larger than usual and the others leave it out."""
        assert self._pending_header is not None
        if self._header.usual:
            return given.clone()
        own = self._pending_header.summary().headers[self._live.transport.world.rank]
        return given.clone() if own.factor else torch.zeros_like(given)

    @property
    def headers(self) -> tuple[Header, ...]:
        """What all said, in rank order; makes the exchange where that was not done."""
        return self._arrive()[0].headers

    def arrive(self) -> list[State]:
        """Wait for all of it; each chunk's new state."""
        return [state for _, state in self._arrive()[1]]

    def _arrive(self) -> tuple[ExchangeSummary, list[Total]]:
        while self._arrived is None:
            try:
                if self._pending_header is None:
                    self._begin()
                assert self._pending_header is not None
                summary = self._pending_header.summary()
                totals = [running.finish() for running in self._running]
                tuner = self._live.exchanger.tuner
                if summary.asked and tuner is not None:
                    self._heard = tuner.gather(self._live.transport)
                self._arrived = summary, totals
            except GivenUpError:
                raise
            except PeerLostError as error:
                self._again()
                self._live.renew(self._live.failed(error))
        return self._arrived

    def _again(self) -> None:
        self._pending_header, self._running, self._arrived, self._heard = None, [], None, None

    def finish(self, made: int = 0) -> ExchangeSummary:
        """Apply it, once it counts.

        Raises:
            DesyncError, MismatchError, NonFiniteError: on every worker alike, with nothing applied.
            GivenUpError: the others go on without this worker.
        """
        began, timing = time.perf_counter(), self._live.exchanger.timing
        timing.wait_s = timing.exchange_s = 0.0
        follows: Generation | None = None
        while follows is None:
            try:
                summary, totals = self._arrive()
            except (DesyncError, MismatchError) as error:
                self._live.member.doing(f"ends with {type(error).__name__}", self._header.total)
                raise
            asked = time.perf_counter()
            follows = self._live.commit(*self._live.exchanger.marks(summary))
            timing.wait_s += time.perf_counter() - asked
            if follows is None:
                self._again()
        self._live.applying.acquire()  # whoever called lets go, when all of it is in its place
        if summary.weight > 0:
            for chunk, (total, state) in zip(self._chunks, totals, strict=True):
                chunk.keep(state)
                chunk.land(total, summary)
        if self._heard is not None and self._live.exchanger.tuner is not None:
            self._live.exchanger.tuner.decide(self._heard)
        timing.exchange_s = time.perf_counter() - began - timing.wait_s
        self._live.applied = self._live.exchange
        self._live.follows = follows
        refuse_nothing(summary, self._live.exchanger.transport.world)
        return summary

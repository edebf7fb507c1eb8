# SPDX-License-Identifier: Apache-2.0
"""One exchange: a small header and a few large chunks, on their way at the same time.

The header is an all-gather of ten integers, so that everybody knows of everybody what matters before anything is
applied: how much work a contribution stands for, whether it is finite, whether the worker is leaving, and the checksum
of what all should hold alike. The chunks are summed by the rule's codec over the rule's route; while one is on its way,
the next is packed and the last one applied.

A worker that is out of data still comes to every exchange of the others, with nothing in its hands, until all are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.communication.base import Pending, Transport
from paceline.errors import DesyncError, ElsewhereError, MismatchError
from paceline.rules.codec import Codec, Dense, Layout, State, Steps
from paceline.rules.topology import Topology
from paceline.update.exchange.agreement import agree, judged, refuse_nothing
from paceline.update.exchange.header import Header, Meeting, Timing
from paceline.update.exchange.pipeline import Finished, Pipeline, Running

IN_FLIGHT = 3
"""Chunks on their way at a time: with two, a link of 1 Gbit/s stood idle for 1 to 7 % of the time."""


class Chunk(Protocol):
    """A piece of the payload, with what its codec remembers of it."""

    @property
    def layout(self) -> Layout:
        """What its numbers are."""

    @property
    def lossless(self) -> bool:
        """Whether it must be written as it is, whatever the rule's codec."""

    @property
    def state(self) -> State:
        """The codec's state."""

    def fill(self, factor: float) -> Tensor:
        """This worker's contribution times `factor` (zeros where that is 0), shape (n,)."""

    def keep(self, state: State) -> None:
        """Take the codec's new state, part of which may lie in the memory that `fill` gave."""

    def land(self, total: Tensor, meeting: Meeting) -> None:
        """Apply the sum over the workers, shape (n,); called after `keep`."""

    def prepare(self, total: Tensor, meeting: Meeting) -> None:
        """Where the exchange runs behind the next block: apply it to what the worker does not touch meanwhile."""

    def move(self, made: int) -> None:
        """Then, when it lands, to the rest; `made` minibatches were made meanwhile."""


class Flying(Protocol):
    """An exchange under way; see :class:`Flight`."""

    @property
    def headers(self) -> tuple[Header, ...]:
        """What all said, in rank order; waits for it."""

    def arrive(self) -> list[State]:
        """Wait until nothing is left to do but to move the tensors; each chunk's new state."""

    def finish(self, made: int = 0) -> Meeting:
        """Apply everything."""


class Exchanger:
    """Starts exchanges over one transport, one after another.

    Args:
        transport: the connection.
        codec: how chunks are written.
        topology: over which route they are summed.
        behind: whether the worker goes on while an exchange is under way.
    """

    def __init__(self, transport: Transport, codec: Codec, topology: Topology, behind: bool = False) -> None:
        self.transport, self.codec = transport, codec
        self._route = topology.route(transport, codec.operations)
        self._behind = behind
        self._pipeline = Pipeline(transport.background and (self._route.stages > 1 or behind), self._route.stages)
        self._announced: Opening | None = None
        self.sequence = 0
        self.asks: Callable[[], bool] = lambda: False
        """Whether this worker has something to say to all once the next exchange is over."""
        self.timing = Timing()
        self.left: int | None = None
        """Number of the exchange in which somebody first came with nothing more to bring."""

    def open(self, header: Header) -> Opening:
        """Say `header` to all; the number of the exchange is filled in here, and whether this worker asks."""
        if self._announced is not None:
            opening, self._announced = self._announced, None
            return opening
        self.sequence += 1
        return Opening(self, replace(header, sequence=self.sequence, asks=self.asks()))

    def announce(self, header: Header) -> Header:
        """Say `header` before anything is packed, and learn what becomes of it; the next `open` goes on from there.

        An unusual contribution goes into the mean or not by what the others bring.
        """
        opening = self.open(header)
        self._announced = opening
        try:
            return opening.meeting().headers[self.transport.world.rank]
        except (DesyncError, MismatchError):  # whoever finishes the exchange is told, when nothing is on the wire
            return replace(opening.header, factor=0.0)

    def tell(self, row: Tensor) -> tuple[Pending, Tensor]:
        """Start to gather `row`, int64, shape (k,), from all: what to wait for, and where the rows will be (N, k)."""
        device = self.transport.wire_device(row.device)
        rows = torch.empty(self.transport.world.size, row.numel(), dtype=torch.int64, device=device)
        return self.transport.all_gather(rows, row.to(device)), rows

    def begin(self, chunk: Chunk, factor: float, number: int, block: bool = False) -> Running:
        """Start the exchange of a chunk; `number` counts the exchanges of its payload; `block`: not of gradients."""
        return self._pipeline.start(self._steps(chunk, chunk.fill(factor), number), eager=block and self._behind)

    def begin_with(self, chunk: Chunk, x: Tensor, number: int) -> Running:
        """The same with a contribution that was filled before; `x` becomes the sum."""
        return self._pipeline.start(self._steps(chunk, x, number))

    def begin_behind(self, chunk: Chunk, factor: float, number: int, opening: Opening) -> Running:
        """The same where the worker goes on meanwhile: all work on the chunk is done where it is carried."""

        def steps() -> Steps[tuple[Tensor, State]]:
            total, state = yield from self._steps(chunk, chunk.fill(factor), number)
            meeting = opening.meeting()
            if meeting.weight > 0:
                chunk.prepare(total, meeting)
            return total, state

        return self._pipeline.start(steps(), eager=True)

    def _steps(self, chunk: Chunk, x: Tensor, number: int) -> Steps[tuple[Tensor, State]]:
        codec = Dense() if chunk.lossless else self.codec.at(number)
        return self._route.exchange(codec, x, chunk.layout, chunk.state)

    def meet(self, header: Header, chunks_of: Callable[[int], Sequence[Chunk]], number: int = 0) -> Meeting:
        """A whole exchange, with a few chunks on their way at a time; see :class:`Flight`."""
        return Flight(self, header, chunks_of, number, IN_FLIGHT).finish()

    def fly(
        self,
        header: Header,
        chunks_of: Callable[[int], Sequence[Chunk]],
        number: int,
        in_flight: int,
        checksum: Callable[[], int],
    ) -> Flying:
        """Start a whole exchange; arguments as for :class:`Flight`. `checksum` gives the header's anew."""
        return Flight(self, header, chunks_of, number, in_flight)

    def close(self) -> None:
        """End what works in the background."""
        self._pipeline.close()


class Opening:
    """A header under way."""

    def __init__(self, exchanger: Exchanger, header: Header) -> None:
        self._exchanger, self.header = exchanger, header
        self._lock = threading.Lock()
        self._pending, self._rows = exchanger.tell(header.pack())
        self._meeting: Meeting | None = None

    @classmethod
    def said(cls, exchanger: Exchanger, meeting: Meeting) -> Opening:
        """One that everybody has heard."""
        opening = cls.__new__(cls)
        opening._exchanger, opening._meeting, opening._lock = exchanger, meeting, threading.Lock()
        opening.header = meeting.headers[exchanger.transport.world.rank]
        return opening

    def meeting(self) -> Meeting:
        """What all said; raises `DesyncError` or `MismatchError` where that does not fit together."""
        with self._lock:  # whoever carries a chunk asks as well
            if self._meeting is None:
                began = self._exchanger.transport.now()
                self._pending.wait()
                meeting = judged(Meeting(tuple(Header.unpack(line) for line in self._rows.tolist())))
                self._exchanger.timing.wait_s += self._exchanger.transport.now() - began
                agree(meeting, self._exchanger.transport.world)
                if self._exchanger.left is None and meeting.anybody_left:
                    self._exchanger.left = self.header.sequence
                self._meeting = meeting
            return self._meeting


class Flight:
    """A header and its payload, under way.

    Args:
        exchanger: the connection.
        header: this worker's.
        chunks_of: kind -> the chunks of that exchange; a worker without a payload takes the kind from the others.
        number: counts the exchanges of this payload, for codecs that begin otherwise than they go on.
        in_flight: chunks on their way at a time, the others follow in `finish`; 0 sends all, and the worker goes on.
    """

    def __init__(
        self,
        exchanger: Exchanger,
        header: Header,
        chunks_of: Callable[[int], Sequence[Chunk]],
        number: int,
        in_flight: int,
    ) -> None:
        self._exchanger, self._number, self._in_flight = exchanger, number, in_flight
        self.behind = in_flight == 0
        exchanger.timing.wait_s = exchanger.timing.exchange_s = 0.0
        began = exchanger.transport.now()
        self.opening = exchanger.open(header)
        self._factor, self._left = header.factor, deque[Chunk]()
        self._under_way: deque[tuple[Chunk, Running]] = deque()
        if header.brings:
            self._left.extend(chunks_of(header.kind))
        elif not (meeting := self.opening.meeting()).empty:
            self._left.extend(chunks_of(meeting.kind))
            self._factor = 0.0
        self._fill_up()
        self._spent_s = exchanger.transport.now() - began

    def _fill_up(self) -> None:
        while self._left and (self.behind or len(self._under_way) < self._in_flight):
            chunk = self._left.popleft()
            if self.behind:
                running = self._exchanger.begin_behind(chunk, self._factor, self._number, self.opening)
            else:
                running = self._exchanger.begin(chunk, self._factor, self._number, block=True)
            self._under_way.append((chunk, running))

    @classmethod
    def arrived(cls, exchanger: Exchanger, meeting: Meeting, arrived: Sequence[tuple[Chunk, State]]) -> Flight:
        """One that was saved when everything had come, and the tensors are still to be moved."""
        flight = cls.__new__(cls)
        flight._exchanger, flight._spent_s, flight._left = exchanger, 0.0, deque()
        flight.opening = Opening.said(exchanger, meeting)
        flight._under_way = deque((chunk, Finished((None, state))) for chunk, state in arrived)
        flight._number, flight._in_flight, flight.behind = 0, 0, True
        return flight

    @property
    def headers(self) -> tuple[Header, ...]:
        """What all said, in rank order."""
        return self.opening.meeting().headers

    def arrive(self) -> list[State]:
        """Wait until nothing is left to do but to move the tensors; each chunk's new state."""
        assert self.behind
        return [running.finish()[1] for _, running in self._under_way]

    def finish(self, made: int = 0) -> Meeting:
        """Apply everything.

        Args:
            made: minibatches made since it began, where the worker went on.

        Raises:
            DesyncError, MismatchError, NonFiniteError: on every worker alike, with nothing applied.
            PeerLostError: somebody did not come.
        """
        now, timing = self._exchanger.transport.now, self._exchanger.timing
        began = now()
        timing.wait_s = 0.0
        meeting: Meeting | None = None
        failure: Exception | None = None
        try:
            meeting = self.opening.meeting()
        except ElsewhereError:
            raise  # nobody answers what is on the wire
        except (DesyncError, MismatchError) as error:
            failure = error  # the others see it too; finish what is on the wire, apply nothing
        while self._under_way:
            chunk, running = self._under_way.popleft()
            waited = now()
            total, state = running.finish()
            if self.behind:
                timing.wait_s += now() - waited
            if meeting is not None and meeting.weight > 0:
                chunk.keep(state)
                if self.behind:
                    chunk.move(made)
                else:
                    chunk.land(total, meeting)
            self._fill_up()
        timing.exchange_s = self._spent_s + now() - began - timing.wait_s
        if failure is not None:
            raise failure
        assert meeting is not None
        refuse_nothing(meeting, self._exchanger.transport.world)
        return meeting

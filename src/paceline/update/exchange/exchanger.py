# SPDX-License-Identifier: Apache-2.0
"""One exchange: a small header and a few large chunks, on the wire at the same time.

The header is an all-gather of eleven integers. Before anything is applied, every worker learns of every other one how
much work its contribution stands for, whether it is finite, whether the worker is leaving, and the checksum of the
replicated state. The chunks are summed by the rule's codec over the rule's route; while one is on the wire, the next
is packed and the last one applied.

In host memory the first chunks leave while later ones are packed, before the header: its norm, or an inf, is known only
when all are packed. If such a contribution is rejected, all workers see so in its header, and sum all chunks once more.

A worker that is out of data keeps joining with an empty contribution until all workers are done.

In order: a `Chunk` is packed, the `Exchanger` sends header and chunks, `PendingHeader` waits for all headers, `agree`
and `with_outliers_dropped` judge them, and `InFlightExchange.finish` applies the sums.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from paceline.communication.base import Pending, Transport
from paceline.communication.calls import check_alike
from paceline.core.world import World
from paceline.data.sharing.place import pass_number
from paceline.errors import DesyncError, ElsewhereError, MismatchError, NonFiniteError
from paceline.rules.codec import Codec, Dense, Layout, State, Steps
from paceline.rules.topology import Topology
from paceline.update.exchange.departures import Departures
from paceline.update.exchange.header import NO_PAYLOAD, ExchangeHeader, ExchangeSummary, Timing
from paceline.update.exchange.outliers import outliers
from paceline.update.exchange.pipeline import Finished, LastWait, Pipeline, Pollable, Running, SideStream, moved


class Chunk(Protocol):
    """A chunk of the payload, with its codec's state."""

    @property
    def layout(self) -> Layout:
        """The shapes of its tensors."""

    @property
    def lossless(self) -> bool:
        """Whether it must be sent dense, whatever the rule's codec."""

    @property
    def from_rank_0(self) -> bool:
        """Whether its sum has rank 0's part only."""

    @property
    def state(self) -> State:
        """The codec's state."""

    def fill(self, factor: float) -> Tensor:
        """This worker's contribution times `factor` (zeros where that is 0), shape (n,)."""

    def keep(self, state: State) -> None:
        """Take the codec's new state, part of which may lie in the memory that `fill` gave."""

    def land(self, total: Tensor, summary: ExchangeSummary) -> None:
        """Apply the sum over the workers, shape (n,); called after `keep`."""

    def prepare(self, total: Tensor, summary: ExchangeSummary) -> None:
        """With overlap: apply the sum to the state that the next block does not touch."""

    def move(self, made: int) -> None:
        """With overlap, at the end: apply the sum to the rest; `made` minibatches were made meanwhile."""


IN_FLIGHT = 3
"""Chunks on the wire at a time: with two, a link of 1 Gbit/s stood idle for 1 to 7 % of the time."""


class StartedExchange(Protocol):
    """An exchange under way; see :class:`InFlightExchange`."""

    @property
    def headers(self) -> tuple[ExchangeHeader, ...]:
        """All workers' headers, in rank order; waits for them."""

    def arrive(self) -> list[State]:
        """Wait until all chunks have arrived; each chunk's new codec state."""

    def finish(self, made: int = 0) -> ExchangeSummary:
        """Finish the exchange and apply it."""


@dataclass(frozen=True)
class Reports:
    """What a worker says of itself in its headers.

    Attributes:
        asks: whether this worker has a request for all workers, to be read once the next exchange is over.
        place: where it is in its data, packed (:mod:`paceline.data.sharing.place`); given whether it leaves.
        made: steps that its program has made.
    """

    asks: Callable[[], bool] = lambda: False
    place: Callable[[bool], int] = lambda leaving: 0
    made: Callable[[], int] = lambda: 0


class Exchanger:
    """Starts exchanges over one transport, one after another.

    Args:
        transport: the connection.
        codec: encodes the chunks.
        topology: the route over which they are summed.
        overlapped: whether the next block computes while an exchange is under way.
        devices: of the model.
        reports: what this worker says of itself in its headers.

    Attributes:
        keeps: whether an exchange keeps its contribution, in the memory of the chunks, until it is applied.
        voted: the header that `pre_vote` sent, or `hold` kept, until `open` returns it.
        departures: judges where the workers end.
        vote_s: seconds of waiting for that vote, until the exchange counts them.
        early: chunks of the next exchange that are on the wire already.
    """

    keeps = False

    def __init__(
        self,
        transport: Transport,
        codec: Codec,
        topology: Topology,
        overlapped: bool = False,
        devices: Iterable[torch.device] = (),
        reports: Reports | None = None,
    ) -> None:
        self.transport, self.codec = transport, codec
        self._route = topology.route(transport, codec.operations)
        self._overlapped = overlapped
        devices = set(devices)
        copies = any(transport.wire_device(device) != device for device in devices)
        threads = transport.background and (self._route.stages > 1 or overlapped or copies)
        # virtual workers add each other's tensors, so all of them stay on one stream
        sides = SideStream.beside(devices if transport.cluster is None else ())
        self._pipeline = Pipeline(threads, self._route.stages, sides)
        self.voted: PendingHeader | None = None
        self.vote_s = 0.0
        self.early: list[tuple[Chunk, Running]] = []
        self._sends_early = transport.background and codec.exact and not overlapped
        self.sequence = 0
        self.reports = reports if reports is not None else Reports()
        self.departures = Departures()
        self.timing = Timing()
        self.left: int | None = None
        """Number of the first exchange in which a worker had no more work."""
        self.awaited = False
        """Whether workers at the end of a pass wait for those that made the last exchange."""

    def open(self, header: ExchangeHeader) -> PendingHeader:
        """Send `header` to all workers, with the number of the exchange and whether this worker has a request."""
        if self.voted is not None:
            pending_header, self.voted = self.voted, None
            return pending_header
        self.sequence += 1
        early, place, asks = bool(self.early), self.reports.place(header.leaving), self.reports.asks()
        return PendingHeader(self, replace(header, sequence=self.sequence, asks=asks, early=early, place=place))

    def hold(self, pending_header: PendingHeader) -> None:
        """Let the next `open` return a header that was sent already."""
        self.voted = pending_header

    def pre_vote(self, header: ExchangeHeader) -> ExchangeHeader:
        """Send `header` before anything is packed, and learn its factor; the next `open` returns this header.

        Whether an unusual contribution goes into the mean depends on what the other workers bring.
        """
        self.voted = pending_header = self.open(header)
        began = self.transport.now()
        try:
            return pending_header.summary().headers[self.transport.world.rank]
        except (DesyncError, MismatchError):  # raised again when the exchange is finished, with nothing on the wire
            return replace(pending_header.header, factor=0.0)
        finally:
            self.vote_s = self.transport.now() - began

    def gather_row(self, row: Tensor) -> tuple[Pending, Tensor]:
        """Start an all-gather of `row`, int64, shape (k,): its handle, and the rows, shape (N, k)."""
        device = self.transport.wire_device(row.device)
        rows = torch.empty(self.transport.world.size, row.numel(), dtype=torch.int64, device=device)
        return self.transport.all_gather(rows, moved(row, device)), rows

    def begin(self, chunk: Chunk, factor: float, number: int, block: bool = False) -> Running:
        """Start the exchange of a chunk; `number` counts the exchanges of its payload; `block`: not of gradients."""
        x = self._part(chunk, chunk.fill(factor))
        return self._pipeline.start(self._steps(chunk, x, number), eager=block and self._overlapped)

    def _part(self, chunk: Chunk, x: Tensor) -> Tensor:
        """What this worker adds to the sum of a chunk."""
        return x.zero_() if chunk.from_rank_0 and self.transport.world.rank else x

    def begin_early(self, chunks: Sequence[Chunk], chunk: Chunk, factor: float, number: int) -> None:
        """Start the exchange of one of the first chunks, in their order, before that of the header."""
        place = len(self.early)
        if self._sends_early and not self.keeps and place < IN_FLIGHT and chunk is chunks[place]:
            self.early.append((chunk, self.begin(chunk, factor, number, block=True)))

    def begin_with(self, chunk: Chunk, given: Tensor, number: int, counts: bool = True) -> Running:
        """The same with a contribution that is filled already and stays; `counts`: whether it goes into the mean."""
        x = given.clone() if counts or chunk.from_rank_0 else torch.zeros_like(given)
        return self._pipeline.start(self._steps(chunk, self._part(chunk, x), number))

    def begin_overlapped(self, chunk: Chunk, factor: float, number: int, pending_header: PendingHeader) -> Running:
        """The same with overlap: the pipeline does all work on the chunk."""

        def steps() -> Steps[tuple[Tensor, State]]:
            total, state = yield from self._steps(chunk, self._part(chunk, chunk.fill(factor)), number)
            if not self.transport.background:
                yield LastWait(pending_header.summary, pending_header.completed)
            summary = pending_header.summary()
            if summary.weight > 0:
                chunk.prepare(total, summary)
            return total, state

        return self._pipeline.start(steps(), eager=True)

    def _steps(self, chunk: Chunk, x: Tensor, number: int) -> Steps[tuple[Tensor, State]]:
        codec = Dense() if chunk.lossless else self.codec.at(number)
        device = self.transport.wire_device(x.device)
        if device == x.device:
            return (yield from self._route.exchange(codec, x, chunk.layout, chunk.state))
        before = {name: tensor.to(device) for name, tensor in chunk.state.items()}
        total, state = yield from self._route.exchange(codec, moved(x, device), chunk.layout, before)
        return x.copy_(total, non_blocking=x.is_cuda), state

    def meet(self, header: ExchangeHeader) -> ExchangeSummary:
        """An exchange of headers alone."""
        return InFlightExchange.start(self, header, (), 0, IN_FLIGHT).finish()

    def start(
        self, header: ExchangeHeader, chunks: Sequence[Chunk], number: int, in_flight: int, checksum: Callable[[], int]
    ) -> StartedExchange:
        """Start a whole exchange; arguments as for :meth:`InFlightExchange.start`.

        `checksum` computes the header's checksum again, where the exchange is repeated.
        """
        return InFlightExchange.start(self, header, chunks, number, in_flight)

    def take_vote_s(self) -> float:
        """Seconds of waiting for a vote before the exchange that starts now."""
        waited_s, self.vote_s = self.vote_s, 0.0
        return waited_s

    def progress(self) -> None:
        """Go on with exchanges under way, without waiting."""
        self._pipeline.progress()

    def continue_at(self, sequence: int) -> None:
        """The next exchange follows that of this number."""
        self.sequence = sequence

    def replace(self, old: Exchanger) -> None:
        """Go on in the place of another one, which ends."""
        self.sequence, self.left, self.departures = old.sequence, old.left, old.departures
        old.close()

    def close(self) -> None:
        """End the pipeline's threads."""
        self._pipeline.close()


class PendingHeader:
    """A header under way to all workers.

    Args:
        exchanger: the connection.
        header: this worker's.
        summary: given where all headers are known already (from a checkpoint).
    """

    def __init__(self, exchanger: Exchanger, header: ExchangeHeader, summary: ExchangeSummary | None = None) -> None:
        self._exchanger, self.header = exchanger, header
        self._lock = threading.Lock()
        self._summary = summary
        if summary is None:
            self._pending, self._rows = exchanger.gather_row(header.row)

    def completed(self) -> bool:
        """Whether `summary` would not wait: headers in host memory have arrived."""
        there = self._summary is not None or (isinstance(self._pending, Pollable) and self._pending.completed())
        return there and (self._summary is not None or self._rows.device.type == "cpu")

    def summary(self) -> ExchangeSummary:
        """All workers' headers; raises `DesyncError` or `MismatchError` where they do not fit together."""
        with self._lock:  # the pipeline's threads ask as well
            if self._summary is None:
                exchanger, transport = self._exchanger, self._exchanger.transport
                began = transport.now()
                self._pending.wait()
                summary = summary_of(self._rows.cpu().numpy().tobytes(), len(self._rows))
                exchanger.timing.wait_s += transport.now() - began
                exchanger.awaited = False
                if not summary.alike:
                    agree(summary, transport.world)
                    exchanger.awaited = summary.awaited
                    exchanger.departures.look(summary, transport.world, exchanger.reports.made())
                if exchanger.left is None and summary.somebody_left:
                    exchanger.left = self.header.sequence
                self._summary = summary
            return self._summary


class InFlightExchange:
    """A header and its payload, under way.

    Args:
        exchanger: the connection.
        pending_header: this worker's header.
        overlapped: whether the next block computes meanwhile.
        under_way: the chunks that are on the wire.
    """

    def __init__(
        self,
        exchanger: Exchanger,
        pending_header: PendingHeader,
        overlapped: bool,
        under_way: Iterable[tuple[Chunk, Running]] = (),
    ) -> None:
        self._exchanger, self._pending_header, self.overlapped = exchanger, pending_header, overlapped
        self._factor, self._number, self._in_flight = 0.0, 0, 0
        self._left = deque[Chunk]()
        self._under_way = deque(under_way)
        self._spent_s = self._vote_s = 0.0

    @classmethod
    def start(
        cls, exchanger: Exchanger, header: ExchangeHeader, chunks: Sequence[Chunk], number: int, in_flight: int
    ) -> InFlightExchange:
        """Send the header and the first chunks.

        Args:
            exchanger: the connection.
            header: this worker's.
            chunks: its payload; a worker without one contributes zeros if another worker brings one.
            number: counts the exchanges of this payload, for codecs whose first exchanges differ.
            in_flight: chunks on the wire at a time; the rest follow in `finish`. 0 sends all of them, with overlap.
        """
        exchanger.timing.begin()
        began = exchanger.transport.now()
        pending_header, (early, exchanger.early) = exchanger.open(header), (exchanger.early, [])
        flight = cls(exchanger, pending_header, in_flight == 0, early)
        flight._factor, flight._number, flight._in_flight = header.factor, number, in_flight
        if header.brings:
            flight._left.extend(chunks[len(early) :])
        elif not flight._pending_header.summary().empty:
            flight._left.extend(chunks)
            own = flight._pending_header.summary().headers[exchanger.transport.world.rank]
            flight._factor = own.factor if own.brings else 0.0
        flight._fill_up()
        flight._spent_s = exchanger.transport.now() - began
        flight._vote_s = exchanger.take_vote_s()
        return flight

    @classmethod
    def arrived(
        cls, exchanger: Exchanger, summary: ExchangeSummary, chunks: Iterable[tuple[Chunk, State]]
    ) -> InFlightExchange:
        """An exchange that was saved after all chunks had arrived; `finish` moves the user's tensors."""
        pending_header = PendingHeader(exchanger, summary.headers[exchanger.transport.world.rank], summary)
        return cls(exchanger, pending_header, True, ((chunk, Finished((None, state))) for chunk, state in chunks))

    def _fill_up(self) -> None:
        while self._left and (self.overlapped or len(self._under_way) < self._in_flight):
            chunk = self._left.popleft()
            if self.overlapped:
                running = self._exchanger.begin_overlapped(chunk, self._factor, self._number, self._pending_header)
            else:
                running = self._exchanger.begin(chunk, self._factor, self._number, block=True)
            self._under_way.append((chunk, running))

    def _repeat(self, summary: ExchangeSummary) -> None:
        """Start all chunks once more, without what was rejected; the sums that are on the wire are of no use."""
        for _, running in self._under_way:
            running.finish()
        self._left.extendleft(reversed([chunk for chunk, _ in self._under_way]))
        self._under_way.clear()
        own = summary.headers[self._exchanger.transport.world.rank]
        self._factor = own.factor if own.brings else 0.0
        self._fill_up()

    @property
    def headers(self) -> tuple[ExchangeHeader, ...]:
        """All workers' headers, in rank order."""
        return self._pending_header.summary().headers

    def arrive(self) -> list[State]:
        """Wait until all chunks have arrived; each chunk's new codec state."""
        assert self.overlapped
        return [running.finish()[1] for _, running in self._under_way]

    def finish(self, made: int = 0) -> ExchangeSummary:
        """Apply all of it.

        Args:
            made: minibatches made since it began, with overlap.

        Raises:
            DesyncError, MismatchError, NonFiniteError: on every worker, with nothing applied.
            PeerLostError: a worker did not take part.
        """
        now, timing = self._exchanger.transport.now, self._exchanger.timing
        began = now()
        timing.wait_s = 0.0
        summary: ExchangeSummary | None = None
        failure: Exception | None = None
        try:
            summary = self._pending_header.summary()
        except ElsewhereError:
            raise  # no worker takes part in what is on the wire
        except (DesyncError, MismatchError) as error:
            failure = error  # every worker sees it; finish what is on the wire, apply nothing
        if self.overlapped:  # a thread of the pipeline may have waited while this one computed
            timing.wait_s = now() - began
        if summary is not None and summary.repeats:
            self._repeat(summary)
        while self._under_way:
            chunk, running = self._under_way.popleft()
            total, state = running.finish()
            if summary is not None and summary.weight > 0:
                chunk.keep(state)
                if self.overlapped:
                    chunk.move(made)
                else:
                    chunk.land(total, summary)
            self._fill_up()
        timing.exchange_s = self._spent_s + now() - began - timing.wait_s
        timing.wait_s += self._vote_s
        if failure is not None:
            raise failure
        assert summary is not None
        refuse_nothing(summary, self._exchanger.transport.world)
        return summary


def refuse_nothing(summary: ExchangeSummary, world: World) -> None:
    """Raise `NonFiniteError` where no worker brought a contribution that can be averaged."""
    if not summary.empty and all(not h.finite for h in summary.headers if h.brings) and summary.weight == 0:
        raise NonFiniteError(
            world.sign(
                f"the contributions of all workers to exchange {summary.headers[0].sequence} hold inf or nan, so "
                "nothing is left to average; the global model is as it was before the block. Lower the learning rate, "
                "clip gradients, or resume from a checkpoint"
            )
        )


@lru_cache(maxsize=4)
def summary_of(rows: bytes, size: int) -> ExchangeSummary:
    """The summary of the headers of `size` workers, from their rows; virtual workers share it."""
    table = torch.frombuffer(bytearray(rows), dtype=torch.int64).view(size, -1).tolist()
    return with_outliers_dropped(ExchangeSummary(tuple(ExchangeHeader.unpack(row) for row in table)).with_joined)


def with_outliers_dropped(summary: ExchangeSummary) -> ExchangeSummary:
    """The summary with the factor 0 for contributions far larger than usual and far larger than the other workers'."""
    said = {rank: (h.norm, h.usual) for rank, h in enumerate(summary.headers) if h.brings and h.finite and h.factor}
    out = outliers(said)
    if not out:
        return summary
    headers = (replace(h, factor=0.0) if rank in out else h for rank, h in enumerate(summary.headers))
    return replace(summary, headers=tuple(headers))


def agree(summary: ExchangeSummary, world: World) -> None:
    """Raise where workers are at different places of the program, or hold different bits."""
    headers = summary.headers
    check_alike([h.kind.code for h in headers], [h.leaving for h in headers], world)
    places = {(h.sequence, h.kind) for h in headers if h.brings} or {(h.sequence, NO_PAYLOAD) for h in headers}
    if len(places) > 1 or len({h.sequence for h in headers}) > 1:
        said = "; ".join(f"{world.name(r)} at exchange {h.sequence}" for r, h in enumerate(headers))
        raise MismatchError(world.sign(f"the workers are at different places of the program: {said}"))
    passes = {rank: pass_number(h.place) for rank, h in enumerate(headers) if h.brings and h.place and not h.leaving}
    if len(set(passes.values())) > 1:
        said = "; ".join(f"{world.name(r)} in pass {number}" for r, number in passes.items())
        raise MismatchError(
            world.sign(
                f"the workers are in different passes over their data: {said}. Every worker has to begin each pass, "
                "and to end it: take run.share out of `if run.world.rank == 0:` or whatever keeps some workers from it"
            )
        )
    sums = {rank: h.checksum for rank, h in enumerate(headers) if h.checksum or not h.at_end}
    compare(sums, headers[0].sequence, world)


def compare(sums: dict[int, int], sequence: int, world: World) -> None:
    """Raise `DesyncError` where checksums (by rank) of replicated state differ."""
    values = list(sums.values())
    if len(set(values)) > 1:
        usual = max(set(values), key=lambda s: (values.count(s), -values.index(s)))
        odd = [rank for rank, s in sums.items() if s != usual]
        raise DesyncError(
            world.sign(
                f"workers that should hold the same global model do not: {world.names(odd)} differ from the others "
                f"at exchange {sequence}. Something wrote to the model outside of the optimizer's step, "
                "or memory is faulty. Resume all workers from the last checkpoint"
            )
        )

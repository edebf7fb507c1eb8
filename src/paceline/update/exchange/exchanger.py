# SPDX-License-Identifier: Apache-2.0
"""One exchange: a small header and a few large chunks, on the wire at the same time.

The header is an all-gather of eleven integers. Before anything is applied, every worker learns of every other one how
much work its contribution stands for, whether it is finite, whether the worker is leaving, and the checksum of the
replicated state. The chunks are summed by the rule's codec over the rule's route; while one is on the wire, the next
is packed and the last one applied.

In host memory the first chunks leave while later ones are packed, before the header: its norm, or an inf, is known only
when all are packed. If such a contribution is rejected, all workers see so in its header, and sum all chunks once more.

A worker that is out of data keeps joining with an empty contribution until all workers are done.

The file has it in the order in which it happens: header, pack, send, wait, apply, judge.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from paceline.communication.base import BLOCK, Pending, Transport, check_alike
from paceline.core.flat import Fragment, flat_view
from paceline.core.world import World
from paceline.data.sharing.place import ENDED, PASS_AT_BIT
from paceline.errors import DesyncError, ElsewhereError, MismatchError, NonFiniteError
from paceline.rules.codec import Codec, Dense, Layout, State, Steps
from paceline.rules.topology import Topology
from paceline.update.exchange.outliers import outliers
from paceline.update.exchange.pipeline import LastWait, Pipeline, Pollable, Running, SideStream, moved

# -- header ---------------------------------------------------------------------------------------


# What an exchange is of; one integer of a header.
NO_PAYLOAD = 0
"""The worker ends, or is at the end of its pass: it brings no payload, and joins any exchange; a block with what it has
made so far."""
WARMUP_END = -1
"""The exchange without a payload that ends a warm-up."""
WAITING = -2
"""The worker waits for its turn: it brings no payload, and joins any exchange."""
STEPPED = -3
"""The worker has made a step in its turn."""


def gradients_kind(optimizer: int) -> int:
    """The gradients of optimizer 0, 1, ..."""
    return 1 + optimizer  # the block of fragment 0, 1, ... is BLOCK + its number


@dataclass(frozen=True)
class ExchangeHeader:
    """What one worker says about its contribution to an exchange."""

    sequence: int = 0  # number of the exchange, the same on all workers
    kind: int = NO_PAYLOAD  # which exchange this is
    brings: bool = False  # whether a payload follows
    leaving: bool = False  # whether the worker has no more work
    finite: bool = True  # whether its contribution is free of inf and nan
    minibatches: int = 0  # that its contribution stands for
    norm: float = 0.0  # of its contribution, before the weight; 0 where not computed
    factor: float = 0.0  # the weight of its contribution
    total: int = 0  # all minibatches of this worker so far
    checksum: int = 0  # of the replicated state, 0 where not computed
    usual: bool = True  # whether the norm is not unusually large (`outliers`)
    asks: bool = False  # whether the worker has a request for all workers, to be read once this exchange is over
    merges: bool = False  # whether it ends the block early, in `run.merge()`
    mean_norm: float = 0.0  # of the mean displacement of its last exchange; 0 where not computed
    early: bool = False  # whether the first chunks of its contribution were sent before this header
    place: int = 0  # where the worker is in its data (`paceline.data.sharing.place`), packed; 0 if it shares none
    stands: bool = False  # whether it joins a block that others bring; not sent

    @property
    def at_end(self) -> bool:
        return bool(self.place & ENDED)

    @property
    def row(self) -> Tensor:
        """The header as it is sent: int64, shape (11,)."""
        condition = self.finite | self.usual << 1 | self.asks << 2 | self.merges << 3
        condition |= self.early << 6 | self.place << 7  # bits 4 and 5 had a meaning in older checkpoints
        norm, factor, mean_norm = struct.unpack("<3q", struct.pack("<3d", self.norm, self.factor, self.mean_norm))
        flags = [self.sequence, self.kind, int(self.brings), int(self.leaving), condition, self.minibatches]
        return torch.tensor([*flags, norm, factor, self.total, self.checksum, mean_norm], dtype=torch.int64)

    @classmethod
    def unpack(cls, row: list[int]) -> ExchangeHeader:
        """The inverse of `row`; older checkpoints have no mean norm."""
        finite, usual, asks, merges, early = (bool(row[4] >> bit & 1) for bit in (0, 1, 2, 3, 6))
        norm, factor, mean = struct.unpack("<3d", struct.pack("<3q", row[6], row[7], *(row[10:] or [0])))
        numbers = row[8], row[9], usual, asks, merges, mean, early, row[4] >> 7
        return cls(row[0], row[1], bool(row[2]), bool(row[3]), finite, row[5], norm, factor, *numbers)


@dataclass(frozen=True)
class ExchangeSummary:
    """The headers of all workers, in rank order; virtual workers share one, and nobody changes what it gives."""

    headers: tuple[ExchangeHeader, ...]  # with the factor 0 where a contribution is rejected
    between: tuple[float, float] | None = None  # least and greatest norm accepted before, where norms are checked

    @cached_property
    def weight(self) -> float:
        """Sum of the factors, the divisor of a total."""
        return sum(h.factor for h in self.headers)

    @cached_property
    def minibatches(self) -> list[int]:
        """Minibatches that each worker's contribution stands for; 0 for a rejected one."""
        return [h.minibatches if h.factor else 0 for h in self.headers]

    @cached_property
    def tau(self) -> float:
        """Minibatches that the mean delta stands for, weighted as the deltas are."""
        weight = self.weight
        return sum(h.factor * h.minibatches for h in self.headers) / weight if weight else 0.0

    @cached_property
    def left_out(self) -> list[int]:
        """Ranks whose contribution was rejected: not finite, or far larger than usual."""
        return [rank for rank, h in enumerate(self.headers) if not h.finite or (not h.usual and not h.factor)]

    @cached_property
    def accepted(self) -> dict[int, float]:
        """Rank -> norm, of the contributions to the mean."""
        return {rank: h.norm for rank, h in enumerate(self.headers) if h.brings and h.factor}

    @cached_property
    def mean_of_norms(self) -> float:
        """Mean norm of the contributions that went into the mean, weighted as they were; 0 where none was taken."""
        weight = self.weight
        return sum(h.factor * h.norm for h in self.headers if h.brings) / weight if weight else 0.0

    @cached_property
    def last_mean_norm(self) -> float:
        """The norm of the last exchange's mean, as one worker found it: others may round otherwise."""
        return next((h.mean_norm for h in self.headers if h.mean_norm), 0.0)

    @cached_property
    def changed(self) -> bool:
        """Whether most contributions were unusual, and therefore accepted."""
        return 2 * sum(self.headers[rank].usual for rank in self.accepted) < len(self.accepted)

    @cached_property
    def somebody_left(self) -> bool:
        """Whether a worker has no more work, or joins a block only because another process of its host trains."""
        return any(h.leaving or (h.kind >= BLOCK and not (h.minibatches or h.merges)) for h in self.headers)

    @cached_property
    def all_leaving(self) -> bool:
        return all(h.leaving for h in self.headers)

    @cached_property
    def kind(self) -> int:
        """Which exchange this is, where a worker brought a payload."""
        return next(h.kind for h in self.headers if h.brings)

    @cached_property
    def brought(self) -> list[int]:
        """Ranks of the workers that brought a payload."""
        return [rank for rank, h in enumerate(self.headers) if h.brings]

    @cached_property
    def asked(self) -> bool:
        return any(h.asks for h in self.headers)

    @cached_property
    def empty(self) -> bool:
        return not any(h.brings for h in self.headers)

    @cached_property
    def all_stand(self) -> bool:
        """Whether every worker stands, or has no more work."""
        return self.empty and all(h.kind == NO_PAYLOAD or h.leaving for h in self.headers)

    @cached_property
    def steps_differ(self) -> bool:
        return len({h.total for h in self.headers}) > 1

    @cached_property
    def alike(self) -> bool:
        """Whether all workers are at the same place, with the same state; most often, and quickly told."""
        places = (
            (h.sequence, h.kind, h.brings, h.leaving, h.checksum, h.at_end, h.stands, h.place >> PASS_AT_BIT)
            for h in self.headers
        )
        first = next(places)
        return all(place == first for place in places)


@dataclass(frozen=True)
class Reports:
    """What a worker says of itself in its headers, and what looks at all of them."""

    # whether this worker has a request for all workers, to be read once the next exchange is over
    asks: Callable[[], bool] = lambda: False
    # where it is in its data, packed (`paceline.data.sharing.place`); given whether it leaves
    place: Callable[[bool], int] = lambda leaving: 0
    # called with headers that are not all alike; may raise
    look: Callable[[ExchangeSummary, World], None] = lambda summary, world: None


@dataclass
class Timing:
    """The time of the present exchange."""

    wait_s: float = 0.0  # seconds of waiting for other workers
    met_at: float | None = None  # when this worker knew that all had entered it, by its transport's clock; None before
    took_s: float = 0.0  # from its beginning to its arrival, where the worker computed meanwhile


# -- pack -----------------------------------------------------------------------------------------


class Chunk(Protocol):
    """A chunk of the payload, with its codec's state."""

    layout: Layout  # the shapes of its tensors
    lossless: bool  # whether it must be sent dense, whatever the rule's codec
    from_rank_0: bool  # whether its sum has rank 0's part only
    state: State  # the codec's

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


# -- send -----------------------------------------------------------------------------------------

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


class Exchanger:
    """Starts exchanges over one transport, one after another; `overlapped`: while the next block computes."""

    keeps = False  # whether an exchange keeps its contribution, in the memory of the chunks, until it is applied

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
        self.chunks, self._route = topology.chunks, topology.route(transport, codec.operations)
        self.overlapped = overlapped
        devices = set(devices)
        copies = any(transport.wire_device(device) != device for device in devices)
        threads = transport.background and (self._route.stages > 1 or overlapped or copies)
        self.sends_early = transport.background and codec.exact and not overlapped and not self.keeps
        # virtual workers add each other's tensors, so all of them stay on one stream
        sides = SideStream.beside(devices if transport.cluster is None else ())
        self.pipeline = Pipeline(threads, self._route.stages, sides)
        self._held: PendingHeader | None = None
        self.early: list[tuple[Chunk, Running]] = []  # chunks of the next exchange that are on the wire already
        self.sequence = 0
        self.reports = reports if reports is not None else Reports()
        self.timing = Timing()  # of the exchange whose header was sent last, or that is being finished
        self.arrived_at = 0.0  # when the last chunk of an overlapped exchange had arrived
        self.left: int | None = None  # number of the first exchange in which a worker had no more work
        self.awaited = False  # whether workers at the end of a pass wait for those that made the last exchange

    def start(
        self,
        header: ExchangeHeader,
        chunks: Sequence[Chunk],
        number: int,
        checksum: Callable[[], int],
        overlapped: bool = False,
    ) -> StartedExchange:
        """Send the header and the first chunks, or all if `overlapped`. A worker without a payload contributes zeros if
        another one brings it. `number` counts the exchanges of this payload, for codecs whose first exchanges differ;
        `checksum` computes the header's again, where the exchange is repeated."""
        pending_header, (early, self.early) = self.open(header), (self.early, [])
        factor, left = header.factor, chunks[len(early) :] if header.brings else ()
        if not header.brings and not pending_header.summary().empty:
            left, own = chunks, pending_header.summary().headers[self.transport.world.rank]
            factor = own.factor if own.brings else 0.0
        flight = InFlightExchange(self, pending_header, overlapped, early, left, factor, number)
        flight.send_more()
        return flight

    def meet(self, header: ExchangeHeader) -> ExchangeSummary:
        """An exchange of headers alone."""
        return InFlightExchange(self, self.open(header), False).finish()

    def open(self, header: ExchangeHeader) -> PendingHeader:
        """Send `header` to all workers, with the number of the exchange and whether this worker has a request; or
        return the one that was sent already."""
        if self._held is not None:
            pending_header, self._held = self._held, None
            return pending_header
        self.sequence, self.timing = self.sequence + 1, Timing()
        early, place, asks = bool(self.early), self.reports.place(header.leaving), self.reports.asks()
        return PendingHeader(self, replace(header, sequence=self.sequence, asks=asks, early=early, place=place))

    def hold(self, pending_header: PendingHeader) -> None:
        """Let the next `open` return a header that was sent already, and for which this worker has waited."""
        self._held, self.timing = pending_header, replace(self.timing, wait_s=0.0)

    def pre_vote(self, header: ExchangeHeader) -> ExchangeHeader:
        """Send `header` before anything is packed, and learn its factor; the next `open` returns this header.

        Whether an unusual contribution goes into the mean depends on what the other workers bring.
        """
        self._held = pending_header = self.open(header)
        try:
            return pending_header.summary().headers[self.transport.world.rank]
        except (DesyncError, MismatchError):  # raised again when the exchange is finished, with nothing on the wire
            return replace(pending_header.header, factor=0.0)

    def gather_row(self, row: Tensor) -> tuple[Pending, Tensor]:
        """Start an all-gather of `row`, int64, shape (k,): its handle, and the rows, shape (N, k)."""
        device = self.transport.wire_device(row.device)
        rows = torch.empty(self.transport.world.size, row.numel(), dtype=torch.int64, device=device)
        return self.transport.all_gather(rows, row if device == row.device else moved(row, device)), rows

    def begin(self, chunk: Chunk, x: Tensor, number: int) -> Running:
        """Start the exchange of a chunk, of which this worker adds `x`."""
        return self.pipeline.start(self.sum(chunk, x, number))

    def begin_early(self, chunks: Sequence[Chunk], chunk: Chunk, factor: float, number: int) -> None:
        """Start the exchange of one of the first chunks, in their order, before that of the header."""
        if len(self.early) < IN_FLIGHT and chunk is chunks[len(self.early)]:
            self.early.append((chunk, self.begin(chunk, chunk.fill(factor), number)))

    def sum_overlapped(
        self, chunk: Chunk, factor: float, number: int, pending_header: PendingHeader
    ) -> Steps[tuple[Tensor, State]]:
        """`sum` with overlap: the pipeline does all work on the chunk."""
        total, state = yield from self.sum(chunk, chunk.fill(factor), number)
        if not self.transport.background:
            yield LastWait(pending_header.summary, pending_header.completed)
        summary = pending_header.summary()
        if summary.weight > 0:
            chunk.prepare(total, summary)
        self.arrived_at = self.transport.now()
        return total, state

    def sum(self, chunk: Chunk, x: Tensor, number: int) -> Steps[tuple[Tensor, State]]:
        """The operations that sum `x`, this worker's part of a chunk, over all workers."""
        if chunk.from_rank_0 and self.transport.world.rank:
            x.zero_()
        codec = Dense() if chunk.lossless else self.codec.at(number)
        device = self.transport.wire_device(x.device)
        if device == x.device:
            return self._route.exchange(codec, x, chunk.layout, chunk.state)

        def elsewhere() -> Steps[tuple[Tensor, State]]:
            before = {name: tensor.to(device) for name, tensor in chunk.state.items()}
            total, state = yield from self._route.exchange(codec, moved(x, device), chunk.layout, before)
            return x.copy_(total, non_blocking=x.is_cuda), state

        return elsewhere()

    def waited(self, began: float, afresh: bool = False) -> None:
        """All workers have entered the exchange; this one has waited since `began`, `afresh` if not before."""
        now = self.transport.now()
        self.timing = Timing(now - began + (0.0 if afresh else self.timing.wait_s), now)

    def judge(self, summary: ExchangeSummary) -> None:
        """All workers have entered an exchange; raises `DesyncError` or `MismatchError` where they do not fit."""
        self.awaited = False
        if not summary.alike:
            agree(summary, self.transport.world)
            stand = [h.at_end or h.stands for h in summary.headers]
            self.awaited = not summary.empty and any(stand) and not all(stand)
            self.reports.look(summary, self.transport.world)
        if self.left is None and summary.somebody_left:
            self.left = summary.headers[0].sequence

    def progress(self) -> None:
        """Go on with exchanges under way, without waiting."""
        self.pipeline.progress()

    def continue_at(self, sequence: int) -> None:
        """The next exchange follows that of this number."""
        self.sequence = sequence

    def replace(self, old: Exchanger) -> None:
        """Go on in the place of another one, which ends."""
        self.sequence, self.left = old.sequence, old.left
        old.close()

    def close(self) -> None:
        self.pipeline.close()


# -- wait -----------------------------------------------------------------------------------------


class PendingHeader:
    """A header under way to all workers; `summary` is given where all are known already (from a checkpoint)."""

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
                exchanger.waited(began)
                exchanger.judge(summary)
                self._summary = summary
            return self._summary


class InFlightExchange:
    """A header and its payload, under way."""

    def __init__(
        self,
        exchanger: Exchanger,
        pending_header: PendingHeader,
        overlapped: bool,
        under_way: Iterable[tuple[Chunk, Running]] = (),
        left: Iterable[Chunk] = (),
        factor: float = 0.0,
        number: int = 0,
    ) -> None:
        self._exchanger, self._pending_header, self.overlapped = exchanger, pending_header, overlapped
        self._under_way, self._left = deque(under_way), deque(left)
        self._factor, self._number = factor, number
        self._began_at = exchanger.transport.now() if overlapped else 0.0

    @classmethod
    def arrived(
        cls, exchanger: Exchanger, summary: ExchangeSummary, chunks: Iterable[tuple[Chunk, State]]
    ) -> InFlightExchange:
        """An exchange that was saved after all chunks had arrived; `finish` moves the user's tensors."""
        pending_header = PendingHeader(exchanger, summary.headers[exchanger.transport.world.rank], summary)
        return cls(exchanger, pending_header, True, [(chunk, Running.finished((None, kept))) for chunk, kept in chunks])

    def send_more(self) -> None:
        """Send the next chunks: as many as are on the wire at a time; with overlap all of them."""
        exchanger = self._exchanger
        while self._left and (self.overlapped or len(self._under_way) < IN_FLIGHT):
            chunk = self._left.popleft()
            if self.overlapped:
                steps = exchanger.sum_overlapped(chunk, self._factor, self._number, self._pending_header)
            else:
                steps = exchanger.sum(chunk, chunk.fill(self._factor), self._number)
            # where blocks overlap, one that waits is eager too: operations start in one order on every worker
            running = exchanger.pipeline.start(steps, eager=self.overlapped or exchanger.overlapped)
            self._under_way.append((chunk, running))

    def _repeat(self, summary: ExchangeSummary) -> None:
        """Start all chunks once more, without what was rejected; the sums that are on the wire are of no use."""
        for _, running in self._under_way:
            running.finish()
        self._left.extendleft(reversed([chunk for chunk, _ in self._under_way]))
        self._under_way.clear()
        own = summary.headers[self._exchanger.transport.world.rank]
        self._factor = own.factor if own.brings else 0.0
        self.send_more()

    @property
    def headers(self) -> tuple[ExchangeHeader, ...]:
        return self._pending_header.summary().headers

    def arrive(self) -> list[State]:
        assert self.overlapped
        return [running.finish()[1] for _, running in self._under_way]

    # -- apply ------------------------------------------------------------------------------------

    def finish(self, made: int = 0) -> ExchangeSummary:
        """Apply all of it; `made`: minibatches made since it began, with overlap. Raises `DesyncError`, `MismatchError`
        or `NonFiniteError` on every worker, with nothing applied; `PeerLostError` where one did not take part."""
        exchanger, transport, overlapped = self._exchanger, self._exchanger.transport, self.overlapped
        began = transport.now() if overlapped else 0.0
        summary: ExchangeSummary | None = None
        failure: Exception | None = None
        try:
            summary = self._pending_header.summary()
        except ElsewhereError:
            raise  # no worker takes part in what is on the wire
        except (DesyncError, MismatchError) as error:
            failure = error  # every worker sees it; finish what is on the wire, apply nothing
        if overlapped:  # a thread of the pipeline may have waited while this one computed
            self._exchanger.waited(began, afresh=True)
        if summary is not None and any(h.early and not h.factor for h in summary.headers):
            self._repeat(summary)
        while self._under_way:
            chunk, running = self._under_way.popleft()
            total, state = running.finish()
            if summary is not None and summary.weight > 0:
                chunk.keep(state)
                if overlapped:
                    chunk.move(made)
                else:
                    chunk.land(total, summary)
            self.send_more()
        if overlapped:
            exchanger.timing = replace(exchanger.timing, took_s=max(0.0, exchanger.arrived_at - self._began_at))
        if failure is not None:
            raise failure
        assert summary is not None
        refuse_nothing(summary, transport.world)
        return summary


# -- judge ----------------------------------------------------------------------------------------


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


def _standing(header: ExchangeHeader, kind: int) -> ExchangeHeader:
    """As the header of a worker that stands, in a block of this kind."""
    brings = header.minibatches > 0
    return replace(header, stands=True, brings=brings, kind=kind if brings else header.kind)


@lru_cache(maxsize=4)
def summary_of(rows: bytes, size: int) -> ExchangeSummary:
    """The summary of the headers of `size` workers, from their rows; virtual workers share it."""
    table = torch.frombuffer(bytearray(rows), dtype=torch.int64).view(size, -1).tolist()
    headers = [ExchangeHeader.unpack(row) for row in table]
    kind = next((h.kind for h in headers if h.brings), NO_PAYLOAD)
    if kind >= BLOCK:  # those that stand bring what they have made so far
        headers = [_standing(h, kind) if h.kind == NO_PAYLOAD else h for h in headers]
    return with_outliers_dropped(ExchangeSummary(tuple(headers)))


def with_outliers_dropped(summary: ExchangeSummary) -> ExchangeSummary:
    """The summary with the factor 0 for contributions far larger than usual and far larger than the other workers'."""
    if all(h.usual for h in summary.headers):
        return summary
    said = {rank: (h.norm, h.usual) for rank, h in enumerate(summary.headers) if h.brings and h.finite and h.factor}
    out = outliers(said)
    headers = (replace(h, factor=0.0) if rank in out else h for rank, h in enumerate(summary.headers))
    return replace(summary, headers=tuple(headers))


def agree(summary: ExchangeSummary, world: World) -> None:
    """Raise where workers are at different places of the program, or hold different bits."""
    headers = summary.headers
    check_alike([h.kind for h in headers], [h.leaving for h in headers], world)
    places = {(h.sequence, h.kind) for h in headers if h.brings} or {(h.sequence, NO_PAYLOAD) for h in headers}
    if len(places) > 1 or len({h.sequence for h in headers}) > 1:
        said = "; ".join(f"{world.name(r)} at exchange {h.sequence}" for r, h in enumerate(headers))
        raise MismatchError(world.sign(f"the workers are at different places of the program: {said}"))
    passes = {rank: h.place >> PASS_AT_BIT for rank, h in enumerate(headers) if h.brings and h.place and not h.leaving}
    if len(set(passes.values())) > 1:
        said = "; ".join(f"{world.name(r)} in pass {number}" for r, number in passes.items())
        raise MismatchError(
            world.sign(
                f"the workers are in different passes over their data: {said}. Every worker has to begin each pass, "
                "and to end it: take run.share out of `if run.world.rank == 0:` or whatever keeps some workers from it"
            )
        )
    sums = {rank: h.checksum for rank, h in enumerate(headers) if h.checksum or not (h.at_end or h.stands)}
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


# -- checksums of exchanged state, by which workers detect that their copies differ ---------------

_PRIME = 1_000_003


def combine(sums: Iterable[Tensor]) -> int:
    """The checksums of several parts as one number that fits a header's field."""
    total, parts = 0, list(sums)
    if len({part.device for part in parts}) == 1:
        parts = torch.stack(parts).tolist()  # an accelerator is waited for once
    for part in parts:
        total = (total * 31 + int(part)) & (2**62 - 1)
    return total


def of_tensors(fragment: Fragment) -> Tensor:
    """The checksum of a fragment's tensors as they are, int64, shape ()."""
    fragment.refresh()
    total = torch.zeros((), dtype=torch.int64, device=fragment.device)
    for name, tensor in zip(fragment.names, fragment.tensors, strict=True):
        fold(total, flat_view(name, tensor))
    return total


def fold(accumulated: Tensor, block: Tensor) -> Tensor:
    """Fold a block's bits into a running checksum: read as integers, and summed modulo 2^64, so any change shows."""
    wide = block.numel() * block.element_size() % 8 == 0 and block.data_ptr() % 8 == 0
    words = block.view(torch.int64 if wide else torch.int32 if block.element_size() >= 4 else torch.int8)
    return torch.add(words.sum(dtype=torch.int64), accumulated, alpha=_PRIME, out=accumulated)

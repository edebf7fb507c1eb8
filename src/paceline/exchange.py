# SPDX-License-Identifier: Apache-2.0
"""One exchange: a small header and a few large chunks, on their way at the same time.

The header is an all-gather of ten integers, so that everybody knows of everybody what matters before anything is
applied: how much work a contribution stands for, whether it is finite, whether the worker is leaving, and the checksum
of what all should hold alike. The chunks are summed by the rule's codec over the rule's route; while one is on its way,
the next is packed and the last one applied.

A worker that is out of data still comes to every exchange of the others, with nothing in its hands, until all are.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.codec import Codec, Exchange, Wire
from paceline.errors import DesyncError, MismatchError, NonFiniteError
from paceline.transport.base import Transport

IN_FLIGHT = 3
"""Chunks on their way at a time: with two, a link of 1 Gbit/s stood idle for 1 to 7 % of the time."""
_FIELDS = 10


@dataclass(frozen=True)
class Header:
    """What one worker says about its part of an exchange.

    Attributes:
        sequence: number of the exchange, the same on all.
        kind: which exchange this is; 0 for a block, 1 + k for the gradients of optimizer k.
        brings: whether a payload follows.
        leaving: whether the worker has come to its end.
        finite: whether its contribution is free of inf and nan.
        minibatches: what its contribution stands for.
        presence: checksum of which parameters have a gradient; 0 for a block.
        factor: the weight its numbers were multiplied with.
        total: all minibatches of this worker so far.
        checksum: of the state that all workers should hold alike, 0 where not taken.
    """

    sequence: int
    kind: int
    brings: bool
    leaving: bool
    finite: bool
    minibatches: int
    presence: int
    factor: float
    total: int
    checksum: int

    def pack(self) -> Tensor:
        """As int64, shape (10,)."""
        bits = struct.unpack("<q", struct.pack("<d", self.factor))[0]
        values = [self.sequence, self.kind, self.brings, self.leaving, self.finite]
        values += [self.minibatches, self.presence, bits, self.total, self.checksum]
        return torch.tensor([int(v) for v in values], dtype=torch.int64)

    @classmethod
    def unpack(cls, row: list[int]) -> Header:
        """The inverse of `pack`."""
        factor = struct.unpack("<d", struct.pack("<q", row[7]))[0]
        flags = (bool(row[2]), bool(row[3]), bool(row[4]))
        return cls(row[0], row[1], *flags, row[5], row[6], factor, row[8], row[9])


@dataclass(frozen=True)
class Meeting:
    """What all workers said, in rank order."""

    headers: tuple[Header, ...]

    @property
    def weight(self) -> float:
        """Sum of the factors; what a total has to be divided by."""
        return sum(h.factor for h in self.headers)

    @property
    def minibatches(self) -> list[int]:
        """Minibatches that each worker's contribution stands for; 0 for one that was left out."""
        return [h.minibatches if h.factor else 0 for h in self.headers]

    @property
    def tau(self) -> float:
        """Minibatches that the mean displacement stands for, weighted as the displacements are."""
        weight = self.weight
        return sum(h.factor * h.minibatches for h in self.headers) / weight if weight else 0.0

    @property
    def left_out(self) -> list[int]:
        """Ranks whose contribution was not finite."""
        return [rank for rank, h in enumerate(self.headers) if not h.finite]

    @property
    def all_leaving(self) -> bool:
        """Whether nobody will come again."""
        return all(h.leaving for h in self.headers)

    @property
    def empty(self) -> bool:
        """Whether nobody brought a payload."""
        return not any(h.brings for h in self.headers)


class Chunk(Protocol):
    """A piece of the payload."""

    def fill(self, factor: float) -> Tensor:
        """This worker's contribution times `factor` (zeros where that is 0), shape (n,)."""

    def land(self, total: Tensor, meeting: Meeting) -> None:
        """Apply the sum over the workers, shape (n,)."""


@dataclass
class Timing:
    """Where the time of an exchange went, seconds."""

    wait_s: float = 0.0
    exchange_s: float = 0.0


class Exchanger:
    """Runs exchanges over one transport, one after another.

    Args:
        transport: the connection.
        codec: how chunks are written.
        wire: over which route they are summed.
    """

    def __init__(self, transport: Transport, codec: Codec, wire: Wire) -> None:
        self.transport, self._codec, self._wire = transport, codec, wire
        self.sequence = 0
        self.timing = Timing()

    def meet(self, header: Header, chunks_of: Callable[[int], Sequence[Chunk]]) -> Meeting:
        """Exchange `header` and, unless nobody brings one, the payload.

        Args:
            header: this worker's.
            chunks_of: kind -> the chunks of that exchange; a worker without a payload takes the kind from the others.

        Raises:
            DesyncError, MismatchError, NonFiniteError: on every worker alike, with nothing applied.
            PeerLostError: somebody did not come.
        """
        began = time.perf_counter()
        self.sequence += 1
        row = header.pack()
        device = self.transport.wire_device(row.device)
        rows = torch.empty(self.transport.world.size, _FIELDS, dtype=torch.int64, device=device)
        pending = self.transport.all_gather(rows, row.to(device))

        def read() -> Meeting:
            pending.wait()
            meeting = Meeting(tuple(Header.unpack(line) for line in rows.tolist()))
            self.timing.wait_s = time.perf_counter() - began
            self._agree(meeting)
            return meeting

        if header.brings:
            meeting = self._payload(chunks_of(header.kind), header.factor, read)
        else:
            meeting = read()
            if not meeting.empty:
                kind = next(h.kind for h in meeting.headers if h.brings)
                self._payload(chunks_of(kind), 0.0, lambda: meeting)
        self.timing.exchange_s = time.perf_counter() - began - self.timing.wait_s
        if not meeting.empty and not all(h.finite for h in meeting.headers) and meeting.weight == 0:
            raise NonFiniteError(
                self.transport.world.sign(
                    f"the contributions of all workers to exchange {header.sequence} hold inf or nan, so nothing is "
                    "left to average; the global model is as it was before the block. Lower the learning rate, clip "
                    "gradients, or resume from a checkpoint"
                )
            )
        return meeting

    def _payload(self, chunks: Sequence[Chunk], factor: float, read: Callable[[], Meeting]) -> Meeting:
        """Send the chunks, a few on their way at a time, and apply what comes back once the header is known good."""
        under_way: deque[tuple[Chunk, Exchange]] = deque()
        meeting: Meeting | None = None
        failure: Exception | None = None

        def land() -> None:
            nonlocal meeting, failure
            if meeting is None and failure is None:
                try:
                    meeting = read()
                except (DesyncError, MismatchError) as error:
                    failure = error  # the others see it too; finish what is on the wire, apply nothing
            chunk, exchange = under_way.popleft()
            total, _, _ = exchange.finish()
            if meeting is not None and meeting.weight > 0:
                chunk.land(total, meeting)

        for chunk in chunks:
            if len(under_way) == IN_FLIGHT:
                land()
            under_way.append((chunk, self._codec.begin(chunk.fill(factor), self._wire, {})))
        while under_way:
            land()
        if failure is not None:
            raise failure
        return meeting if meeting is not None else read()

    def _agree(self, meeting: Meeting) -> None:
        """Refuse to go on where workers are at different places or hold different bits."""
        world, headers = self.transport.world, meeting.headers
        places = {(h.sequence, h.kind) for h in headers if h.brings} or {(h.sequence, 0) for h in headers}
        if len(places) > 1 or len({h.sequence for h in headers}) > 1:
            said = "; ".join(f"{world.name(r)} at exchange {h.sequence}" for r, h in enumerate(headers))
            raise MismatchError(world.sign(f"the workers are at different places of the program: {said}"))
        sums = [h.checksum for h in headers]
        if len(set(sums)) > 1:
            usual = max(set(sums), key=lambda s: (sums.count(s), -sums.index(s)))
            odd = [rank for rank, s in enumerate(sums) if s != usual]
            raise DesyncError(
                world.sign(
                    f"workers that should hold the same global model do not: {world.names(odd)} differ from the others "
                    f"at exchange {headers[0].sequence}. Something wrote to the model outside of the optimizer's step, "
                    "or memory is faulty. Resume all workers from the last checkpoint"
                )
            )


_PRIME = 1_000_003


def combine(sums: Iterable[Tensor]) -> int:
    """The checksums of several parts as one number that fits a header's field."""
    total = 0
    for part in sums:
        total = (total * 31 + int(part)) & (2**62 - 1)
    return total


def fold(accumulated: Tensor, block: Tensor) -> Tensor:
    """Fold a block's bits into a running checksum, both on the block's device.

    The block is read as integers and summed modulo 2^64: one pass at the speed of memory, and any single change shows.

    Args:
        accumulated: int64, shape ().
        block: any dtype, shape (n,), contiguous.
    """
    wide = block.numel() * block.element_size() % 8 == 0 and block.data_ptr() % 8 == 0
    lanes = block.view(torch.int64 if wide else torch.int32 if block.element_size() >= 4 else torch.int8)
    return accumulated.mul_(_PRIME).add_(lanes.sum(dtype=torch.int64))

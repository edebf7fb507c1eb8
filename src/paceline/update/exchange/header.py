# SPDX-License-Identifier: Apache-2.0
"""The header of an exchange: what each worker says about its contribution, and the summary of all headers."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from paceline.communication import calls
from paceline.data.sharing.place import ENDED, pass_number


@dataclass(frozen=True)
class ExchangeKind:
    """The exchange that a header belongs to: an optimizer's gradients, a fragment's block, or neither.

    >>> ExchangeKind.block(2).is_block, ExchangeKind.gradients(0).optimizer
    (True, 0)

    Attributes:
        code: its integer in a packed header.
    """

    code: int

    @classmethod
    def gradients(cls, optimizer: int) -> ExchangeKind:
        """The gradients of optimizer 0, 1, ..."""
        return cls(1 + optimizer)

    @classmethod
    def block(cls, fragment: int) -> ExchangeKind:
        """The block of fragment 0, 1, ..."""
        return cls(calls.BLOCK + fragment)

    @property
    def is_block(self) -> bool:
        """Whether it is the exchange of a block."""
        return self.code >= calls.BLOCK

    @property
    def joins(self) -> bool:
        """Whether the worker only joins what others exchange."""
        return self.code == 0

    @property
    def optimizer(self) -> int:
        """The optimizer whose gradients are exchanged."""
        return self.code - 1

    @property
    def fragment(self) -> int:
        """The fragment whose block is exchanged."""
        return self.code - calls.BLOCK


NO_PAYLOAD = ExchangeKind(0)
"""The worker ends, or is at the end of its pass: it brings no payload, and joins any exchange; a block with what it has
made so far."""
WARMUP_END = ExchangeKind(-1)
"""The exchange without a payload that ends a warm-up."""


@dataclass(frozen=True)
class LocalWork:
    """What a worker did since the last exchange.

    Attributes:
        minibatches: steps of the optimizer.
        total: the same since attach.
        factor: weight of the contribution; 1 for a full one.
        leaving: whether the worker has no more work.
        merges: whether it ends the block early.
        stands: whether it only joins a block that another worker brings.
    """

    minibatches: int
    total: int
    factor: float = 1.0
    leaving: bool = False
    merges: bool = False
    stands: bool = False


@dataclass(frozen=True)
class ExchangeHeader:
    """What one worker says about its contribution to an exchange.

    Attributes:
        sequence: number of the exchange, the same on all workers.
        kind: which exchange this is.
        brings: whether a payload follows.
        leaving: whether the worker has no more work.
        finite: whether its contribution is free of inf and nan.
        minibatches: that its contribution stands for.
        norm: of its contribution, before the weight; 0 where not computed.
        factor: the weight of its contribution.
        total: all minibatches of this worker so far.
        checksum: of the replicated state, 0 where not computed.
        usual: whether the norm is not unusually large (:mod:`.outliers`).
        asks: whether the worker has a request for all workers, to be read once this exchange is over.
        merges: whether it ends the block early, in `run.merge()`.
        mean_norm: of the mean displacement of its last exchange; 0 where not computed.
        early: whether the first chunks of its contribution were sent before this header.
        place: where the worker is in its data (:mod:`paceline.data.sharing.place`), packed; 0 if it shares none.
    """

    sequence: int
    kind: ExchangeKind
    brings: bool
    leaving: bool
    finite: bool
    minibatches: int
    norm: float
    factor: float
    total: int
    checksum: int
    usual: bool = True
    asks: bool = False
    merges: bool = False
    mean_norm: float = 0.0
    early: bool = False
    place: int = 0

    @property
    def at_end(self) -> bool:
        """Whether the worker's last pass is over."""
        return bool(self.place & ENDED)

    @property
    def row(self) -> Tensor:
        """The header as it is sent: int64, shape (11,)."""
        condition = self.finite | self.usual << 1 | self.asks << 2 | self.merges << 3
        condition |= self.early << 6 | self.place << 7  # bits 4 and 5 had a meaning in older checkpoints
        values = [
            self.sequence,
            self.kind.code,
            self.brings,
            self.leaving,
            condition,
            self.minibatches,
            to_bits(self.norm),
        ]
        values += [to_bits(self.factor), self.total, self.checksum, to_bits(self.mean_norm)]
        return torch.tensor([int(v) for v in values], dtype=torch.int64)

    @classmethod
    def unpack(cls, row: list[int]) -> ExchangeHeader:
        """The inverse of `row`."""
        finite, usual, asks, merges, early = (bool(row[4] >> bit & 1) for bit in (0, 1, 2, 3, 6))
        norm, factor, *mean_norm = (from_bits(bits) for bits in (row[6], row[7], *row[10:]))
        mean = mean_norm[0] if mean_norm else 0.0
        numbers = row[8], row[9], usual, asks, merges, mean, early, row[4] >> 7
        return cls(row[0], ExchangeKind(row[1]), bool(row[2]), bool(row[3]), finite, row[5], norm, factor, *numbers)


def to_bits(number: float) -> int:
    """The bits of a number as an integer of the same width."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def from_bits(bits: int) -> float:
    """The inverse of `to_bits`."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


@dataclass(frozen=True)
class ExchangeSummary:
    """The headers of all workers, in rank order; virtual workers share one, and nobody changes what it gives.

    Attributes:
        headers: with the factor 0 where a contribution is rejected.
        between: least and greatest norm accepted before, where norms are checked.
    """

    headers: tuple[ExchangeHeader, ...]
    between: tuple[float, float] | None = None

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
    def repeats(self) -> bool:
        """Whether a contribution is rejected of which chunks were sent, so that all chunks are summed once more."""
        return any(h.early and not h.factor for h in self.headers)

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
        idle = (h.kind.is_block and not (h.minibatches or h.merges) for h in self.headers)
        return any(idle) or any(h.leaving for h in self.headers)

    @cached_property
    def awaited(self) -> bool:
        """Whether workers that have ended a pass wait for those that brought this payload in it."""
        return not self.empty and any(h.at_end for h in self.headers) and not all(h.at_end for h in self.headers)

    @cached_property
    def all_leaving(self) -> bool:
        """Whether this is the last exchange of every worker."""
        return all(h.leaving for h in self.headers)

    @cached_property
    def kind(self) -> ExchangeKind:
        """Which exchange this is, where a worker brought a payload."""
        return next(h.kind for h in self.headers if h.brings)

    @cached_property
    def asked(self) -> bool:
        """Whether a worker has a request for all workers."""
        return any(h.asks for h in self.headers)

    @cached_property
    def empty(self) -> bool:
        """Whether no worker brought a payload."""
        return not any(h.brings for h in self.headers)

    @cached_property
    def all_stand(self) -> bool:
        """Whether every worker stands, or has no more work."""
        return self.empty and all(h.kind.joins or h.leaving for h in self.headers)

    @cached_property
    def alike(self) -> bool:
        """Whether all workers are at the same place, with the same state; most often, and quickly told."""
        first = self.headers[0]
        place = (first.sequence, first.kind.code, first.brings, first.leaving, first.checksum, pass_number(first.place))
        return all(
            (h.sequence, h.kind.code, h.brings, h.leaving, h.checksum, pass_number(h.place)) == place
            for h in self.headers
        )

    @property
    def with_joined(self) -> ExchangeSummary:
        """Where a worker brings a block, those that stand bring what they have made so far."""
        if self.empty or not self.kind.is_block or not any(h.kind.joins for h in self.headers):
            return self
        joined = (
            replace(h, brings=True, kind=self.kind) if h.kind.joins and h.minibatches else h for h in self.headers
        )
        return replace(self, headers=tuple(joined))


@dataclass
class Timing:
    """Where the time of an exchange went, seconds.

    Attributes:
        wait_s: of waiting for other workers.
        exchange_s: beyond that, that it kept this worker.
    """

    wait_s: float = 0.0
    exchange_s: float = 0.0

    def begin(self) -> None:
        """An exchange begins."""
        self.wait_s = self.exchange_s = 0.0

    def end(self, spent_s: float) -> None:
        """It has kept this worker so long, waiting included."""
        self.exchange_s = spent_s - self.wait_s

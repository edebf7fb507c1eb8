# SPDX-License-Identifier: Apache-2.0
"""The double-sided quantised all-reduce, which every element-wise quantiser Q shares.

    worker i:   v_i = x_i + r_i,       r_i <- v_i - Q(v_i)                     and sends stripe j of Q(v_i) to worker j
    owner j:    s_j = sum_i Q(v_i)_j + o_j,       o_j <- s_j - Q(s_j)          and sends Q(s_j) to everybody
    total     = Q(s_0), Q(s_1), .., Q(s_{N-1})                                the same bits on every worker

r_i, the worker's residual, is `state["residual"]`; o_j, the owner's, is `state["owner"]`; without feedback both are 0.
Summed over exchanges nothing is lost: totals + residuals of workers and owners = everything given. The N stripes are
consecutive and of equal length, a multiple of 64; the last ones may be shorter or empty. Owners add in rank order, and
their own part goes through the quantiser too. A single worker (N = 1) quantises twice, as any other number.

Source: Seide et al., Interspeech 2014. A quantiser works on groups of numbers (:mod:`paceline.rules.codec.groups`),
each with a fixed number of float32 levels and of bytes, so the size of every message is known before it comes. On the
wire: the levels of all groups of the stripe, then the codes of all groups.

Payload of a stripe = sum over groups (4 levels + code_bytes(length)); worker j sends each other stripe's payload once
and its own N-1 times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from paceline.core import kernels
from paceline.core.parse import check_bool
from paceline.rules.codec.base import State, Steps, Wire
from paceline.rules.codec.layout import Layout, Matrix

STRIPE_UNIT = 64
LARGEST = torch.finfo(torch.float32).max
_CACHED = 1 << 18  # numbers that a CPU handles at a time, so that they stay in its cache
_LAUNCHED = 1 << 24  # numbers that an accelerator handles at a time, so that launches cost little
# Allocated and freed at once: glibc then keeps scratch of this size, instead of returning its pages to the kernel and
# faulting them in again for each piece, which would double the time.
torch.empty(1 << 24, dtype=torch.uint8)


class TwoSided(ABC):
    """A quantiser Q and its exchange.

    Attributes:
        levels: float32 numbers that a group sends beside its codes.
        feedback: whether the unsent rest is added to the next x, on the workers and on the owners.
        fused: whether there are kernels (:mod:`paceline.core.kernels`).
    """

    exact = False
    operations = 2  # to the owners, and back
    whole = False

    fused: ClassVar[bool] = False
    levels: ClassVar[int]
    feedback: bool

    def __post_init__(self) -> None:
        check_bool("feedback", self.feedback)

    @abstractmethod
    def groups(self, layout: Layout) -> tuple[Matrix, ...]:
        """Matrices whose rows are the groups; they cover the layout in order."""

    @abstractmethod
    def code_bytes(self, length: int) -> int:
        """Bytes of the codes of a group of `length` numbers."""

    @abstractmethod
    def write(self, x: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
        """Quantise groups `x`, float32 (R, C), into `codes`, uint8 (R, code_bytes(C)), and `levels`, (R, levels).

        Returns what `read` makes of them.
        """

    @abstractmethod
    def read(self, codes: Tensor, levels: Tensor, length: int) -> Tensor:
        """What was written, float32 (R, length)."""

    def encode_fused(self, x: Tensor, residual: Tensor | None, codes: Tensor, levels: Tensor) -> None:
        """`write` and what is around it, in a kernel: x <- v - Q(v), float32 (R, C), with v = x + residual."""
        raise NotImplementedError

    def add_fused(self, total: Tensor, codes: Tensor, levels: Tensor) -> None:
        """total <- total + what `read` gives, float32 (R, C), in a kernel."""
        raise NotImplementedError

    @abstractmethod
    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""

    def at(self, number: int) -> TwoSided:
        return self

    def exchange(self, x: Tensor, layout: Layout, wire: Wire, state: State) -> Steps[tuple[Tensor, State]]:
        """The sum of what was sent, twice quantised; see :class:`paceline.rules.codec.base.Codec`."""
        stripes = _stripes(layout, wire.size)
        sizes = [self.payload_bytes(stripe.layout) for stripe in stripes]
        own, size = stripes[wire.rank], sizes[wire.rank]
        sent = wire.space(sum(sizes), torch.uint8, x.device)
        residual = state.get("residual")
        for stripe, payload in zip(stripes, sent.split_with_sizes(sizes), strict=True):
            self.encode(stripe.of(x), stripe.layout, payload, None if residual is None else stripe.of(residual))
        arrived = wire.space(wire.size * size, torch.uint8, x.device)
        yield wire.all_to_all(arrived, sent, [size] * wire.size, sizes)

        owner = self._owner(own, x, wire, state)
        for payload in arrived.view(wire.size, size):
            self.decode(payload, own.layout, owner)
        answers = arrived.view(wire.size, size)
        self.encode(owner, own.layout, answers[0], None)
        answers[1:] = answers[0]
        yield wire.all_to_all(sent, arrived, sizes, [size] * wire.size)

        total = wire.space(layout.numel, x.dtype, x.device).zero_()
        for stripe, payload in zip(stripes, sent.split_with_sizes(sizes), strict=True):
            self.decode(payload, stripe.layout, stripe.of(total))
        return total, ({"residual": x, "owner": owner} if self.feedback else {})

    def _owner(self, own: Stripe, x: Tensor, wire: Wire, state: State) -> Tensor:
        """o_j, to which the sum is added; with feedback this memory is kept."""
        if "owner" in state:
            return state["owner"].clone()
        length = own.layout.numel
        return torch.zeros_like(own.of(x)) if self.feedback else wire.space(length, x.dtype, x.device).zero_()

    def encode(self, x: Tensor, layout: Layout, payload: Tensor, residual: Tensor | None) -> None:
        """x <- v - Q(v) with v = x + residual, x of shape (n,); Q(v) goes into `payload`, uint8."""
        pieces, fused = self._pieces(layout, x.device), self.fused and kernels.serve(x)
        levels = x.new_empty((_groups(pieces), self.levels), dtype=torch.float32)
        for piece in pieces:
            v = piece.of(x)
            if fused:
                rest = None if residual is None else piece.of(residual)
                self.encode_fused(v, rest, piece.codes(payload), piece.levels(levels))
                continue
            if residual is not None:
                v.add_(piece.of(residual))
            single = v if v.dtype == torch.float32 else v.clamp(-LARGEST, LARGEST).float()
            v.sub_(self.write(single, piece.codes(payload), piece.levels(levels)))
        payload[: 4 * levels.numel()] = levels.view(-1).view(torch.uint8)

    def decode(self, payload: Tensor, layout: Layout, total: Tensor) -> None:
        """total <- total + what `payload` says; total of shape (n,)."""
        pieces, fused = self._pieces(layout, total.device), self.fused and kernels.serve(total)
        numbers = _groups(pieces) * self.levels
        levels = payload[: 4 * numbers].clone().view(torch.float32).view(-1, self.levels) if numbers else payload[:0]
        for piece in pieces:
            if fused:
                self.add_fused(piece.of(total), piece.codes(payload), piece.levels(levels))
                continue
            piece.of(total).add_(self.read(piece.codes(payload), piece.levels(levels), piece.length))

    def _pieces(self, layout: Layout, device: torch.device) -> tuple[GroupRun, ...]:
        return _cut(self, layout, _CACHED if device.type == "cpu" else _LAUNCHED)

    def payload_bytes(self, layout: Layout) -> int:
        """Bytes that this layout takes on the wire, once."""
        return sum(m.rows * (4 * self.levels + self.code_bytes(m.columns)) for m in self.groups(layout))

    def bytes_sent(self, layout: Layout, workers: int, rank: int) -> int:
        """The others' stripes once, the own one N-1 times."""
        sizes = [self.payload_bytes(stripe.layout) for stripe in _stripes(layout, workers)]
        return sum(sizes) - sizes[rank] + (workers - 1) * sizes[rank]


@dataclass(frozen=True)
class Stripe:
    """The numbers [begin, end) that one worker sums, and their layout."""

    begin: int
    end: int
    layout: Layout

    def of(self, x: Tensor) -> Tensor:
        """The stripe of a flat tensor, shape (end - begin,)."""
        return x[self.begin : self.end]


@dataclass(frozen=True)
class GroupRun:
    """Groups of one length that are handled together: `rows` of `length` numbers.

    Attributes:
        begin: place of the first number.
        rows: groups.
        length: numbers of a group.
        first: which group of the layout the first one is.
        at: place of its codes in the payload, in bytes.
        width: bytes of a group's codes.
    """

    begin: int
    rows: int
    length: int
    first: int
    at: int
    width: int

    def of(self, x: Tensor) -> Tensor:
        """The numbers, shape (rows, length)."""
        return x[self.begin : self.begin + self.rows * self.length].view(self.rows, self.length)

    def codes(self, payload: Tensor) -> Tensor:
        """The codes, shape (rows, width)."""
        return payload[self.at : self.at + self.rows * self.width].view(self.rows, self.width)

    def levels(self, levels: Tensor) -> Tensor:
        """The levels, shape (rows, levels)."""
        return levels[self.first : self.first + self.rows]


@lru_cache(maxsize=256)
def _stripes(layout: Layout, workers: int) -> tuple[Stripe, ...]:
    length = -(-layout.numel // (workers * STRIPE_UNIT)) * STRIPE_UNIT
    ends = [min(layout.numel, rank * length) for rank in range(workers + 1)]
    return tuple(Stripe(b, e, layout.cut(b, e)) for b, e in pairwise(ends))


@lru_cache(maxsize=1024)
def _cut(codec: TwoSided, layout: Layout, numbers: int) -> tuple[GroupRun, ...]:
    """The groups of a layout in pieces of about so many numbers."""
    groups = codec.groups(layout)
    runs, first, at = [], 0, 4 * codec.levels * sum(matrix.rows for matrix in groups)
    for matrix in groups:
        width, most = codec.code_bytes(matrix.columns), max(1, numbers // matrix.columns)
        for row in range(0, matrix.rows, most):
            rows = min(most, matrix.rows - row)
            runs.append(GroupRun(matrix.offset + row * matrix.columns, rows, matrix.columns, first, at, width))
            first, at = first + rows, at + rows * width
    return tuple(runs)


def _groups(pieces: tuple[GroupRun, ...]) -> int:
    return pieces[-1].first + pieces[-1].rows if pieces else 0

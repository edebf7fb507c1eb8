# SPDX-License-Identifier: Apache-2.0
"""PowerSGD: every matrix as a product of two thin ones, by one step of power iteration.

    M_i = G_i + E_i                           matrix (n, m) of worker i with its residual
    P = orth(sum_i M_i Q)                     (n, r), from the Q of the exchange before; first sum on the wire
    Q_i = M_i^T P,   Q = sum_i Q_i            (m, r), second sum
    total = P Q^T,   E_i = M_i - P Q_i^T

total = sum_i (M_i - E_i), for P P^T projects linearly. orth(A) is the Q factor of Householder's QR: orthonormal for any
A, also one of zeros or of a smaller rank, and whatever the magnitude. The warm-started Q is orthonormalised before use
too: that leaves the span of P and hence the result as it is, and keeps P in the range of float32 where the reference's
Q grows with the gradient. A column of Q that became 0 (M had nothing in that direction) starts again from the random
one, where the reference would never leave 0. The first Q is Gaussian, seeded by the matrix' place in the layout: the
same on every worker, and no global generator is touched.

Vectors, and matrices with min_rate r (n + m) > n m, are sent as they are, inside the first sum. Apply momentum after
the exchange, not before it.

Bytes: two sums, of (dense numbers + sum of n r) and of (sum of m r) numbers; 2 (N-1)/N * 4 bytes a number.

Source: Vogels, Karimireddy & Jaggi, NeurIPS 2019, arXiv 1905.13727. Sums stand for its means: P does not change by a
factor, and Q carries it. Workers have the same P because they compute it from the same bits with the same library.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from paceline.core.parse import check, check_bool, check_whole, is_number
from paceline.rules.codec.base import State, Steps, Wire
from paceline.rules.codec.layout import Layout, Matrix

_SEED = 0x9A5E


@dataclass(frozen=True)
class LowRank:
    """Two thin factors for every matrix.

    Attributes:
        rank: r, columns of the factors.
        feedback: error feedback.
        min_rate: the least ratio of the matrix' numbers to the factors'; below it the matrix is sent as it is.
    """

    exact = False
    operations = 2  # the sums of P and of Q
    whole = True  # a part of a matrix has worse factors

    rank: int = 4
    feedback: bool = True
    min_rate: float = 2

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1)
        check_bool("feedback", self.feedback)
        check(is_number(self.min_rate) and self.min_rate >= 1, "min_rate", "a number from 1 on", self.min_rate)

    def at(self, number: int) -> LowRank:
        return self

    def exchange(self, x: Tensor, layout: Layout, wire: Wire, state: State) -> Steps[tuple[Tensor, State]]:
        """The sum of the projected matrices; see :class:`paceline.rules.codec.base.Codec`."""
        plan = _plan(layout, self.rank, self.min_rate)
        if self.feedback and "residual" in state:
            x.add_(state["residual"])
        first = x.new_empty(plan.first_numbers)  # not from the wire: equally aligned on every worker, so equal products
        second = x.new_empty(plan.second_numbers)  # kept as the next exchange's Q
        old = state.get("q")
        for number, thin in enumerate(plan.thin):
            q = _start(thin, number, x, self.rank) if old is None else _restart(thin.q(old, self.rank), thin, number)
            torch.mm(thin.of(x), _orthonormal(q), out=thin.p(first, self.rank))
        for place, matrix in plan.dense:
            first[place : place + matrix.numel] = x[matrix.offset : matrix.end]
        yield from wire.sum(first)

        for thin in plan.thin:
            p = thin.p(first, self.rank)
            p.copy_(_orthonormal(p))
            q = torch.mm(thin.of(x).t(), p, out=thin.q(second, self.rank))
            thin.of(x).addmm_(p, q.t(), alpha=-1)
        yield from wire.sum(second)

        total = wire.space(layout.numel, x.dtype, x.device)
        for thin in plan.thin:
            torch.mm(thin.p(first, self.rank), thin.q(second, self.rank).t(), out=thin.of(total))
        for place, matrix in plan.dense:
            total[matrix.offset : matrix.end] = first[place : place + matrix.numel]
            x[matrix.offset : matrix.end] = 0
        return total, ({"residual": x, "q": second} if self.feedback else {"q": second})

    def bytes_sent(self, layout: Layout, workers: int, rank: int) -> int:
        """2 (N-1)/N * 4 bytes a number of either sum."""
        plan = _plan(layout, self.rank, self.min_rate)
        return sum(2 * 4 * n * (workers - 1) // workers for n in (plan.first_numbers, plan.second_numbers))

    def describe(self, workers: int) -> str:
        return f"low rank (rank {self.rank})" + (", error feedback" if self.feedback else "")


@dataclass(frozen=True)
class _Thin:
    """A matrix that is sent as factors, and their offsets in the first and second sum."""

    matrix: Matrix
    p_at: int
    q_at: int

    def of(self, x: Tensor) -> Tensor:
        """The matrix in a flat tensor, shape (n, m)."""
        return x[self.matrix.offset : self.matrix.end].view(self.matrix.rows, self.matrix.columns)

    def p(self, first: Tensor, rank: int) -> Tensor:
        """P, shape (n, r)."""
        return first[self.p_at : self.p_at + self.matrix.rows * rank].view(-1, rank)

    def q(self, second: Tensor, rank: int) -> Tensor:
        """Q, shape (m, r)."""
        return second[self.q_at : self.q_at + self.matrix.columns * rank].view(-1, rank)


@dataclass(frozen=True)
class _Plan:
    """The matrices sent as factors and the dense ones, with the latter's places in the first sum."""

    thin: tuple[_Thin, ...]
    dense: tuple[tuple[int, Matrix], ...]
    first_numbers: int
    second_numbers: int


@lru_cache(maxsize=256)
def _plan(layout: Layout, rank: int, min_rate: float) -> _Plan:
    thin, dense, first, second = [], [], 0, 0
    for matrix in layout.matrices:
        if min_rate * rank * (matrix.rows + matrix.columns) <= matrix.numel:
            thin.append(_Thin(matrix, first, second))
            first, second = first + matrix.rows * rank, second + matrix.columns * rank
        else:
            dense.append((first, matrix))
            first += matrix.numel
    return _Plan(tuple(thin), tuple(dense), first, second)


def _orthonormal(a: Tensor) -> Tensor:
    """Orthonormal columns whose span holds that of `a`, shape (k, r), k >= r; never nan."""
    q: Tensor = torch.linalg.qr(a)[0]
    return q


def _start(thin: _Thin, number: int, like: Tensor, rank: int) -> Tensor:
    """The random first Q of matrix `number`, shape (m, r)."""
    generator = torch.Generator().manual_seed(_SEED + number)
    return torch.randn(thin.matrix.columns, rank, generator=generator, dtype=like.dtype).to(like.device)


def _restart(q: Tensor, thin: _Thin, number: int) -> Tensor:
    """Q, with random columns in place of those that became 0."""
    dead = (q == 0).all(0)
    return torch.where(dead, _start(thin, number, q, q.shape[1]), q) if bool(dead.any()) else q

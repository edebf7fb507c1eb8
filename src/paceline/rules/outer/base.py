# SPDX-License-Identifier: Apache-2.0
"""What an outer step is.

All outer steps here are element-wise, so they can be applied to any slice of the flat parameters, block by block, and
by the owner of a slice alone. They work in place on the outer state, which is explicit and is what a checkpoint holds:
`anchor` (theta, the global model) and the tensors that `tensors` names. `start` is where the workers' next block
begins, `origin` where the last one began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Coefficients:
    """The numbers of one block.

    Attributes:
        momentum: eta of this block.
        lr: zeta of this block.
        ahead: the eta with which this block's start was looked ahead (eta of this block when it began).
        next_momentum: eta of the next block, with which its start is looked ahead.
    """

    momentum: float
    lr: float
    ahead: float
    next_momentum: float


class Outer(Protocol):
    """How the mean displacement of a block becomes the next global model."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the state tensors besides the anchor, each of the anchor's shape."""

    def momentum_at(self, block: int, workers: int) -> float:
        """eta of block `block` (the first is 1) with N = `workers`."""

    def lr_at(self, block: int, workers: int) -> float:
        """zeta of block `block` with N = `workers`."""

    def origin(self, anchor: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        """Where the block that just ended began, shape (n,); may write into `out` or return `anchor`."""

    def step(self, anchor: Tensor, merged: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        """Apply `merged`, the mean displacement, shape (n,), to `anchor` and `state` in place; the next start."""

    def equivalent_minibatches(self, rho: float, tau: float, c: Coefficients) -> tuple[float, float]:
        """(rho_n, kv_n): what the filtered update stands for, and what the start is ahead of the mean by."""

    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""

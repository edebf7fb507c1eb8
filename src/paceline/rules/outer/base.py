# SPDX-License-Identifier: Apache-2.0
"""The outer step protocol.

An outer step is element-wise, so it can be applied to any slice of the flat parameters. It works in place on the outer
state, which checkpoints hold: `anchor` (theta, the global model) and the tensors that `tensors` names. The workers'
next block begins at the start that `step` returns; the last one began at `origin`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Coefficients:
    """The numbers of one block.

    Attributes:
        momentum: eta of this block.
        lr: zeta of this block.
        ahead: the eta of this block's look-ahead start (eta of this block when it began).
        next_momentum: eta of the next block, for its look-ahead start.
        diversity: A of the blocks before (:mod:`paceline.rules.outer.diversity`).
        block: n, the first is 1.
    """

    momentum: float
    lr: float
    ahead: float
    next_momentum: float
    diversity: float = 1.0
    block: int = 1


class Outer(Protocol):
    """How the mean displacement of a block becomes the next global model."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the state tensors besides the anchor, each of the anchor's shape."""

    def momentum_at(self, block: int, workers: float) -> float:
        """eta of block `block` (the first is 1) with N = `workers`."""

    def lr_at(self, block: int, workers: float) -> float:
        """zeta of block `block` with N = `workers`."""

    def origin(self, anchor: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        """Where the block that just ended began, shape (n,); may write into `out` or return `anchor`."""

    def step(self, anchor: Tensor, merged: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        """Apply `merged`, the mean displacement, shape (n,), to `anchor` and `state` in place; the next start."""

    def equivalent_minibatches(self, rho: float, tau: float, c: Coefficients) -> tuple[float, float]:
        """(rho_n, kv_n): equivalent minibatches of the filtered update, and those by which the start leads the mean."""

    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""


def written(step: Any, *later: str) -> str:
    """A step as text, without the fields `later` where they have their defaults: texts from before they existed, which
    checkpoints hold, stay equal."""
    shown = [one.name for one in fields(step) if one.name not in later or getattr(step, one.name) != one.default]
    return f"{type(step).__name__}({', '.join(f'{name}={getattr(step, name)!r}' for name in shown)})"

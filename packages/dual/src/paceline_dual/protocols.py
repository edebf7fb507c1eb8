# SPDX-License-Identifier: Apache-2.0
"""What dual learning asks of a model: a conditional one P(y | x), and a prior P(x).

Any torch module can play either part; :mod:`paceline_dual.transformer`, :mod:`paceline_dual.classifier` and
:mod:`paceline_dual.hugging_face` have ready ones. A model that is trained, and every prior, is also an `nn.Module`.

What x and y are is the model's own affair, as long as the first axis counts the examples: sequences (see
:mod:`paceline_dual.sequences`), labels [B], images or features [B, ...].
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Conditional(Protocol):
    """P(y | x)."""

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        """log P(y | x), shape [B], natural logarithm, with gradient.

        Of a sequence it is the sum over its symbols and its end, never the mean.
        """
        ...

    def sample(self, x: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
        """k independent draws from P(. | x) for each x, shape [B, k, ...], without gradient and without dropout."""
        ...

    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable y that a search finds, all different, best first; without gradient and without dropout.

        Returns:
            candidates [B, k, ...] and their log P(y | x) [B, k]. Where there are fewer than k, the rest has log P of
            -inf and, for sequences, holds padding only.
        """
        ...


@runtime_checkable
class Prior(Protocol):
    """P(x)."""

    def log_prob(self, x: Tensor) -> Tensor:
        """log P(x), shape [B], natural logarithm, with gradient; the sum over a sequence's symbols and its end."""
        ...


def repeat(x: Tensor, k: int) -> Tensor:
    """Each row k times, one after the other: [B, ...] -> [B * k, ...], as `flat` orders k candidates for each x."""
    return x.repeat_interleave(k, 0)


def flat(y: Tensor) -> Tensor:
    """k candidates for each x as one batch: [B, k, ...] -> [B * k, ...]."""
    return y.flatten(0, 1)


@contextlib.contextmanager
def undisturbed(model: object) -> Iterator[None]:
    """Inside, nothing has a gradient and a module is in eval mode; afterwards each of its parts is as it was."""
    modes = [(part, part.training) for part in model.modules()] if isinstance(model, nn.Module) else []
    try:
        for part, _ in modes:
            part.training = False
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training

# SPDX-License-Identifier: Apache-2.0
"""Connectionist temporal classification that can be stacked, and the edit distance by which readings are judged.

Source: A. Graves et al., ICML 2006. Symbol 0 is the blank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def in_front(number: int, in_dims: tuple[int | None, ...], given: tuple[Tensor, ...]) -> list[Tensor]:
    """Each with the workers as its first dimension."""
    return [
        tensor.expand(number, *tensor.shape) if where is None else tensor.movedim(where, 0)
        for tensor, where in zip(given, in_dims, strict=True)
    ]


class Ctc(torch.autograd.Function):
    """Torch's own CTC loss of each reading; stacked workers become one large batch of it."""

    @staticmethod
    def forward(scores: Tensor, times: Tensor, numbers: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, T, SYMBOLS), not normalised; the losses (B,) in nats, and their gradients."""
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            likely = torch.log_softmax(leaf, 2).transpose(0, 1)
            losses = F.ctc_loss(likely, numbers, times, lengths, reduction="none", zero_infinity=True)
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        """Keep the gradients."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Gradients of the scores."""
        (gradient,) = ctx.saved_tensors
        return losses[:, None, None] * gradient, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        """All workers' readings side by side."""
        stacked = in_front(info.batch_size, in_dims, given)
        outs = Ctc.apply(*(tensor.flatten(0, 1) for tensor in stacked))
        return tuple(out.unflatten(0, (info.batch_size, -1)) for out in outs), (0, 0)


def loss_of(scores: Tensor, times: Tensor, numbers: Tensor, lengths: Tensor) -> Tensor:
    """Loss in nats per symbol: the mean over readings, so that the mean of minibatches is that of all.

    Args:
        scores: (B, T, SYMBOLS), not normalised.
        times: (B,), how many of T there are.
        numbers: (B, longest), what is to be read, padded with 0.
        lengths: (B,), how many of them there are.
    """
    losses: Tensor = Ctc.apply(scores, times, numbers, lengths)[0]
    return (losses / lengths).mean()


def symbols_of(best: Tensor) -> list[int]:
    """Greedy decoding of the best symbol at each time, (T,): repeats and blanks left out."""
    symbols = torch.unique_consecutive(best)
    found: list[int] = symbols[symbols > 0].tolist()
    return found


def edits(found: list[int], truth: list[int]) -> int:
    """Edit distance: the fewest insertions, deletions and replacements."""
    row = list(range(len(truth) + 1))
    for i, symbol in enumerate(found, start=1):
        before, row[0] = row[0], i
        for j, wanted in enumerate(truth, start=1):
            above = row[j]
            row[j] = min(above + 1, row[j - 1] + 1, before + (symbol != wanted))
            before = above
    return row[-1]

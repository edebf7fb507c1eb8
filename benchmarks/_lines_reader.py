# SPDX-License-Identifier: Apache-2.0
"""A reader of lines that can be stacked, and CTC for it.

The picture is cut into overlapping pieces of columns, one every STRIDE pixels. Linear layers over a piece, then over a
piece and its neighbours, give the scores of the symbols: convolutions over the width, written as products of matrices,
which `torch.func` stacks without copies of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from _lines import HEIGHT, SYMBOLS, WIDTH
from torch import Tensor, nn

STRIDE, PIECE = 3, 12  # pixels
TIMES = WIDTH // STRIDE


class Ctc(torch.autograd.Function):
    """Torch's own CTC loss of each line; stacked workers become one large batch of it."""

    @staticmethod
    def forward(scores: Tensor, numbers: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, TIMES, SYMBOLS), not normalised; the losses (B,) in nats, and their gradients."""
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            likely = torch.log_softmax(leaf, 2).transpose(0, 1)
            times = torch.full_like(lengths, len(likely))
            losses = F.ctc_loss(likely, numbers, times, lengths, reduction="none", zero_infinity=True)
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        """Keep the gradients."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, losses: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Gradients of the scores."""
        (gradient,) = ctx.saved_tensors
        return losses[:, None, None] * gradient, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        """All workers' lines side by side."""
        number = info.batch_size
        stacked = [
            tensor.expand(number, *tensor.shape) if where is None else tensor.movedim(where, 0)
            for tensor, where in zip(given, in_dims, strict=True)
        ]
        outs = Ctc.apply(*(tensor.flatten(0, 1) for tensor in stacked))
        return tuple(out.unflatten(0, (number, -1)) for out in outs), (0, 0)


class Reader(nn.Module):
    """Scores of a symbol (0 is CTC's blank) at TIMES places of a line."""

    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.look = nn.Linear(HEIGHT * PIECE, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.near, self.far = nn.Linear(3 * hidden, hidden), nn.Linear(3 * hidden, hidden)
        self.output = nn.Linear(hidden, SYMBOLS)

    def forward(self, pictures: Tensor) -> Tensor:
        """(B, HEIGHT, WIDTH) -> (B, TIMES, SYMBOLS)."""
        lines, edge = len(pictures), (PIECE - STRIDE + 1) // 2
        pieces = F.pad(pictures, (edge, PIECE - STRIDE - edge)).unfold(2, PIECE, STRIDE)  # (B, HEIGHT, TIMES, PIECE)
        # Two dimensions, (B TIMES, features): with three, stacked products would copy the weights for each line.
        seen = self.norm(self.look(pieces.transpose(1, 2).reshape(lines * TIMES, HEIGHT * PIECE))).relu()
        seen = seen + self.near(_with_neighbours(seen, lines)).relu()
        seen = seen + self.far(_with_neighbours(seen, lines)).relu()
        return self.output(seen).view(lines, TIMES, SYMBOLS)  # type: ignore[no-any-return]


def _with_neighbours(seen: Tensor, lines: int) -> Tensor:
    """(B TIMES, hidden) -> (B TIMES, 3 hidden): what is left of a place, there, and right of it."""
    padded = F.pad(seen.view(lines, TIMES, -1), (0, 0, 1, 1))
    return torch.cat([padded[:, :-2], padded[:, 1:-1], padded[:, 2:]], 2).view(lines * TIMES, -1)


def loss_of(model: nn.Module, pictures: Tensor, numbers: Tensor, lengths: Tensor) -> Tensor:
    """CTC loss in nats per character: the mean over lines, so that the mean of minibatches is that of all lines."""
    losses: Tensor = Ctc.apply(model(pictures), numbers, lengths)[0]
    return (losses / lengths).mean()


@torch.no_grad()
def read(model: nn.Module, pictures: Tensor) -> list[list[int]]:
    """Symbols by greedy decoding: the best of every place, repeats and blanks left out."""
    found = []
    for best in model(pictures).argmax(2):
        symbols = torch.unique_consecutive(best)
        found.append(symbols[symbols > 0].tolist())
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

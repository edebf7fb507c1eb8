# SPDX-License-Identifier: Apache-2.0
"""A reader of lines that can be stacked.

The picture is cut into overlapping pieces of columns, one every STRIDE pixels. Linear layers over a piece, then over a
piece and its neighbours, give the scores of the symbols: convolutions over the width, written as products of matrices,
which `torch.func` stacks without copies of the weights.
"""

from __future__ import annotations

from pathlib import Path

import _ctc
import torch
import torch.nn.functional as F
from _lines import HEIGHT, SYMBOLS, WIDTH, Lines, dirty, kept
from _reading import error_rate
from torch import Tensor, nn

STRIDE, PIECE = 3, 12  # pixels
TIMES = WIDTH // STRIDE
TRAINING_LINES, TUNING_LINES, FINAL_LINES = 65_536, 1_024, 2_048


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
    """CTC loss in nats per character."""
    scores = model(pictures)
    return _ctc.loss_of(scores, torch.full_like(lengths, scores.shape[1]), numbers, lengths)


@torch.no_grad()
def read(model: nn.Module, pictures: Tensor) -> list[list[int]]:
    """Symbols by greedy decoding."""
    return [_ctc.symbols_of(best) for best in model(pictures).argmax(2)]


def training(folder: Path, lines: int) -> Lines:
    """The lines to train on; a training that reads fewer lines needs no more."""
    return kept(folder, "training", min(TRAINING_LINES, lines), held_out=False)


def held_out(folder: Path) -> tuple[Lines, Tensor]:
    """Lines of other modules, and dirty pictures; the first TUNING_LINES choose the rate, the rest is judged."""
    lines = kept(folder, "held-out", TUNING_LINES + FINAL_LINES, held_out=True)
    return lines, dirty(lines.pictures, torch.Generator().manual_seed(0))


def line_error(model: nn.Module, folder: Path) -> float:
    """Edits per character of the judged lines."""
    lines, pictures = held_out(folder)
    readings = [text for part in pictures.split(256) for text in read(model, part)]
    truths = [row[:length].tolist() for row, length in zip(lines.numbers, lines.lengths, strict=True)]
    return error_rate(readings[TUNING_LINES:], truths[TUNING_LINES:])

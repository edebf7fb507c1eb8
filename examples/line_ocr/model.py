# SPDX-License-Identifier: Apache-2.0
"""A small CRNN: convolutions over the picture, an LSTM in both directions, and CTC on top."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lines import HEIGHT, SYMBOLS
from torch import nn


def _convolution(channels_in: int, channels_out: int, pool: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(pool),
    )


class LineReader(nn.Module):
    """Logits of a symbol (0 is CTC's blank) for every second column of a picture."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.eye = nn.Sequential(
            _convolution(1, 12, (2, 2)),
            _convolution(12, 24, (2, 1)),
            _convolution(24, 32, (2, 1)),
        )
        self.lstm = nn.LSTM(32 * (HEIGHT // 8), hidden, batch_first=True, bidirectional=True)
        self.output = nn.Linear(2 * hidden, SYMBOLS)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """(batch, 1, HEIGHT, WIDTH) -> (batch, WIDTH / 2, SYMBOLS)."""
        columns = self.eye(pictures).flatten(1, 2).transpose(1, 2)
        states, _ = self.lstm(columns)
        return self.output(states)

    def loss(self, pictures: torch.Tensor, numbers: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """CTC loss in nats per character."""
        scores = torch.log_softmax(self(pictures), dim=2).transpose(0, 1)  # (time, batch, symbols)
        times = torch.full((len(pictures),), len(scores))
        total = F.ctc_loss(scores, numbers, times, lengths, reduction="sum", zero_infinity=True)
        return total / lengths.sum()

    @torch.no_grad()
    def read(self, pictures: torch.Tensor) -> list[list[int]]:
        """The symbols of each picture by greedy decoding: the best of every column, repeats and
        blanks left out."""
        found = []
        for best in self(pictures).argmax(dim=2):
            kept = torch.unique_consecutive(best)
            found.append(kept[kept > 0].tolist())
        return found


def edits(read: list[int], truth: list[int]) -> int:
    """Edit distance: the fewest insertions, deletions and replacements."""
    row = list(range(len(truth) + 1))
    for i, symbol in enumerate(read, start=1):
        before, row[0] = row[0], i
        for j, wanted in enumerate(truth, start=1):
            above = row[j]
            row[j] = min(above + 1, row[j - 1] + 1, before + (symbol != wanted))
            before = above
    return row[-1]

# SPDX-License-Identifier: Apache-2.0
"""A LightRNN as one graph that takes a word and gives the most probable next ones, for `torch.export` and ONNX.

A word cannot be more probable than its row, so words of the rows that were not tried are at most as probable as the
most probable of these rows. The k best words of the tried rows are the k best of all where none is less probable.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import MismatchError
from paceline_lightrnn.model import LightRNN
from paceline_lightrnn.state import wide
from paceline_lightrnn.table import EMPTY

ROWS = 16
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
CELLS = {"gru": torch.gru_cell, "rnn": torch.rnn_tanh_cell}


class NextWords(nn.Module):
    """The next words of a trained LightRNN; it shares the model's parameters.

    >>> import torch
    >>> from paceline_lightrnn import LightRNN, NextWords, WordTable
    >>> step = NextWords(LightRNN(WordTable.random(100), 8), k=3, rows=10).eval()
    >>> program = torch.export.export(step, (torch.tensor([0]), step.begin(1)))
    >>> words, log_probs, exact, hidden = program.module()(torch.tensor([0]), step.begin(1))
    >>> words.shape, bool(exact)
    (torch.Size([1, 3]), True)

    Args:
        model: the model; its table is copied.
        k: number of words.
        rows: that are tried, the most probable ones; with all rows of the table the words are always exact.

    Raises:
        MismatchError: there are no such k or rows.
    """

    row: Tensor
    column: Tensor
    word: Tensor

    def __init__(self, model: LightRNN, k: int = 10, rows: int = ROWS) -> None:
        super().__init__()
        table = model.table
        rows = min(rows, table.rows)
        if not 1 <= k <= table.words or rows * table.columns < k:
            raise MismatchError(
                f"k is 1 to {table.words}, and no more than the cells of {rows} rows, {rows * table.columns}; got {k}"
            )
        self.k, self.rows, self.layers, self.dimension = k, rows, model.layers, model.dimension
        self.cell = model.cell
        self.recurrent, self.row_bias, self.column_bias = model.recurrent, model.row_bias, model.column_bias
        self.row_in, self.column_in = model.row_in, model.column_in
        self.row_out, self.column_out = model.row_out, model.column_out
        for name in ("row", "column", "word"):
            self.register_buffer(name, getattr(table, name).to(torch.int32))

    def begin(self, batch: int) -> tuple[Tensor, ...]:
        """The state before the first word."""
        zero = self.row_in.new_zeros(self.layers, batch, self.dimension)
        return (zero, zero.clone()) if self.cell == "lstm" else (zero,)

    def forward(self, word: Tensor, hidden: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """The words to come after one more word of each sequence.

        Args:
            word: shape [B], int64; begin with the end of a line, 0.
            hidden: what the word before returned, or `begin(B)`.

        Returns:
            The words, most probable first, shape [B, k]; their log-probabilities, shape [B, k]; whether these are the
            k most probable of all words, and not of the tried rows only, shape [B], bool; the state for the next word.
        """
        batch = word.shape[0]
        _, hidden = self._half(F.embedding(self.row[word].long(), self.row_in), hidden)
        output, hidden = self._half(F.embedding(self.column[word].long(), self.column_in), hidden)
        empty = self.word == EMPTY
        logits = wide(F.linear(output, self.row_out, self.row_bias))
        bounds, order = logits.masked_fill(empty.all(1), -torch.inf).log_softmax(1).sort(1, descending=True)
        rows = order[:, : self.rows]
        repeated = tuple(h.repeat_interleave(self.rows, 1) for h in hidden)
        output, _ = self._half(F.embedding(rows.flatten(), self.row_in), repeated)
        logits = wide(F.linear(output, self.column_out, self.column_bias))
        # an empty row has no column to normalise over: its bound is minus infinity anyway
        log_probs = logits.masked_fill(empty[rows.flatten()], -torch.inf).log_softmax(1).nan_to_num(nan=-torch.inf)
        found = log_probs.view(batch, self.rows, -1) + bounds[:, : self.rows, None]
        best, places = found.flatten(1).topk(self.k, 1)
        words = self.word[rows].flatten(1).gather(1, places).long()
        return words, best, self._exact(best, bounds), hidden

    def _exact(self, best: Tensor, bounds: Tensor) -> Tensor:
        if self.rows == bounds.shape[1]:
            return torch.ones_like(best[:, 0], dtype=torch.bool)
        return best[:, -1] >= bounds[:, self.rows]

    def _half(self, vectors: Tensor, hidden: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A half-step of the vectors [n, d], by the cell itself: a module of many steps is more than a graph needs."""
        after: list[tuple[Tensor, ...]] = []
        for layer in range(self.layers):
            weights = [getattr(self.recurrent, f"{name}_l{layer}") for name in WEIGHTS]
            before = [h[layer] for h in hidden]
            if self.cell == "lstm":
                after.append(torch.lstm_cell(vectors, before, *weights))
            else:
                after.append((CELLS[self.cell](vectors, before[0], *weights),))
            vectors = after[-1][0]
        return vectors, tuple(torch.stack(each) for each in zip(*after, strict=True))

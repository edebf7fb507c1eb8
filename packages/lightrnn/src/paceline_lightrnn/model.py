# SPDX-License-Identifier: Apache-2.0
"""LightRNN: a recurrent language model that predicts the row of the next word, then its column.

Word w lies in row r(w) and column c(w) of a table. With f the recurrent network, x the vectors of its input and y those
of its output, each word takes two half-steps with the same weights::

    h_row[t]    = f(x_column(w[t-1]), h_column[t-1])     P(row of w[t])            = softmax(y_row . h_row[t] + b_row)
    h_column[t] = f(x_row(w[t]),      h_row[t])          P(column of w[t] | row)   = softmax(y_column . h_column[t] + b)
    P(w[t] | before) = P(row) P(column | row)

So the state after a word's column vector predicts the next word's row, and the state after a word's row vector the same
word's column. Source: Li, Qin, Yang, Hu, Liu, "LightRNN", NIPS 2016, equations 1 to 4.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import MismatchError
from paceline_lightrnn import storage
from paceline_lightrnn.language import LanguageModel
from paceline_lightrnn.ranking import Ranking, top_words
from paceline_lightrnn.state import PADDING, Hidden, State, check_words, make_recurrent, run
from paceline_lightrnn.table import WordTable
from paceline_lightrnn.tabled import Tabled

FORMAT = "paceline lightrnn 1"
SPREAD = 0.1  # small against the state's range of 1: all words are nearly equally probable at first
AT_ONCE = 1 << 22  # logits that `distribution` computes at a time


class LightRNN(Tabled, LanguageModel):
    """The language model.

    Empty cells of the table have probability 0, so that the probabilities of all words sum to 1. The vectors are
    initialised uniformly within +-0.1, so small that no word is favoured, biases with zero; for the rest see
    `make_recurrent`.

    Args:
        table: the cells of the words; a plain attribute, replaced by assigning another table of the same shape.
        dimension: d, of the vectors and of the hidden state.
        layers: of the recurrent network.
        cell: "lstm", "gru" or "rnn".
        dropout: share of the input vectors', of the outputs' and, between layers, of the states' numbers set to zero
            in training.
        tied: input and output vectors are the same tensors.

    Attributes:
        row_in: parameter [R, d].
        column_in: parameter [C, d].
        row_out: parameter [R, d].
        column_out: parameter [C, d].
        row_bias: parameter [R].
        column_bias: parameter [C].
        recurrent: nn.LSTM, nn.GRU or nn.RNN, batch first.

    Raises:
        UnsupportedError: there is no such cell, or a number is out of range.
    """

    def __init__(
        self,
        table: WordTable,
        dimension: int,
        *,
        layers: int = 1,
        cell: str = "lstm",
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__(table)
        self.words, self.dimension, self.layers, self.cell, self.tied = table.words, dimension, layers, cell, tied
        self.recurrent = make_recurrent(cell, dimension, layers, dropout)
        self.dropout = nn.Dropout(dropout)
        self.row_in, self.column_in = _vectors(table.rows, dimension), _vectors(table.columns, dimension)
        self.row_out = self.row_in if tied else _vectors(table.rows, dimension)
        self.column_out = self.column_in if tied else _vectors(table.columns, dimension)
        self.row_bias = nn.Parameter(torch.zeros(table.rows))
        self.column_bias = nn.Parameter(torch.zeros(table.columns))

    def extra_repr(self) -> str:
        return f"{self.table}, {self.dimension}, tied={self.tied}"

    # -- half-steps -----------------------------------------------------------------------------------

    def begin(self, batch: int, word: int = 0) -> State:
        """The zero state, then the row vector of `word` (by convention the end-of-line word), for each sequence."""
        if batch < 1 or not 0 <= word < self.table.words:
            raise MismatchError(
                f"begin takes 1 sequence at least and a word from 0 to {self.table.words - 1}; got {batch} and {word}"
            )
        last = torch.full((batch,), word, dtype=torch.int64, device=self.row_in.device)
        _, hidden = self._half(F.embedding(self.table.row[last], self.row_in), None)
        return State(hidden, last)

    def halves(self, words: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Run the half-steps of words [B, T].

        Returns:
            h_row [B, T, d], from which `row_logits` predicts the row of words[:, t] (the state after the column vector
            of the word before); h_column [B, T, d], from which `column_logits` predicts the column of the same word
            (the state after its row vector); and the state after the last row vector. Dropout has been applied.
        """
        words = check_words(words, self.table.words)
        known = words.clamp(min=0)
        before = torch.cat((state.last[:, None], known[:, :-1]), 1)
        columns = F.embedding(self.table.column[before], self.column_in)
        rows = F.embedding(self.table.row[known], self.row_in)
        inputs = torch.stack((columns, rows), 2).flatten(1, 2)  # column(last), row(w1), column(w1), .., row(wT)
        outputs, hidden = run(self.recurrent, self.dropout(inputs), state.hidden)
        outputs = self.dropout(outputs)
        return outputs[:, 0::2], outputs[:, 1::2], State(hidden, known[:, -1])

    def row_logits(self, hidden: Tensor) -> Tensor:
        """y_row . h + b of every row, empty or not: [..., R] of h_row [..., d]."""
        return F.linear(hidden, self.row_out, self.row_bias)

    def column_logits(self, hidden: Tensor) -> Tensor:
        """y_column . h + b of every column, empty or not: [..., C] of h_column [..., d]."""
        return F.linear(hidden, self.column_out, self.column_bias)

    def _half(self, vectors: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """One half-step of the vectors [n, d]: output [n, d], state."""
        output, hidden = run(self.recurrent, self.dropout(vectors)[:, None], hidden)
        return self.dropout(output[:, 0]), hidden

    def _after_column(self, state: State) -> tuple[Tensor, State]:
        """log P [B, R] of the next word's row, and the state between the halves."""
        output, hidden = self._half(F.embedding(self.table.column[state.last], self.column_in), state.hidden)
        return self._mask_rows(self.row_logits(output)).log_softmax(-1), State(hidden, state.last)

    def _after_row(self, between: State, rows: Tensor) -> tuple[Tensor, Hidden]:
        """log P [n, C] of the columns if the next word lies in these rows [n], and the recurrent state then."""
        output, hidden = self._half(F.embedding(rows, self.row_in), between.hidden)
        return self._mask_columns(self.column_logits(output), rows).log_softmax(-1), hidden

    # -- probabilities --------------------------------------------------------------------------------

    def log_prob(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """See `LanguageModel.log_prob`."""
        h_row, h_column, state = self.halves(words, self.begin(words.shape[0]) if state is None else state)
        return self.log_prob_of_halves(words, h_row, h_column), state

    def log_prob_of_halves(self, words: Tensor, h_row: Tensor, h_column: Tensor) -> Tensor:
        """log P of words [B, T] from the results of `halves`; 0 for padding."""
        known = words.clamp(min=0)  # padding as word 0, whose row is not empty, so that no softmax is
        rows, columns = self.table.row[known], self.table.column[known]
        nll = self._row_nll(self.row_logits(h_row), rows)
        nll = nll + self._column_nll(self.column_logits(h_column), rows, columns)
        return (-nll).masked_fill(words == PADDING, 0.0)

    def distribution(self, state: State) -> Tensor:
        """log P of every next word, [B, V]; computes all rows, unlike `next_words`."""
        table, batch = self.table, state.last.numel()
        row_log_probs, between = self._after_column(state)
        found = []
        some = max(1, AT_ONCE // (batch * max(table.columns, self.dimension)))
        for rows in torch.split(torch.arange(table.rows, device=state.last.device), some):
            sequences = torch.arange(batch, device=rows.device).repeat_interleave(rows.numel())
            log_probs, _ = self._after_row(between.select(sequences), rows.repeat(batch))
            found.append(log_probs.view(batch, rows.numel(), table.columns) + row_log_probs[:, rows, None])
        return torch.cat(found, 1).flatten(1)[:, table.cells]

    @torch.no_grad()
    def rank(self, state: State, k: int) -> Ranking:
        """The k most probable next words, and the number of tried rows; see `ranking.top_words`."""
        row_log_probs, between = self._after_column(state)

        def columns(sequences: Tensor, rows: Tensor) -> Tensor:
            return self._after_row(between.select(sequences), rows)[0]

        return top_words(row_log_probs, columns, self.table, k)

    def next_words(self, state: State, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable next words [B, k] and their log-probabilities; exact, without all rows."""
        return self.rank(state, k)[:2]

    @torch.no_grad()
    def draw(self, state: State, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, State]:
        """A next word for each sequence: its row is drawn, then its column. No other row is computed.

        The temperature applies to the row's distribution, then to that of the column in it.
        """
        row_log_probs, between = self._after_column(state)
        rows = _draw(row_log_probs, temperature, generator)
        column_log_probs, hidden = self._after_row(between, rows)
        words = self.table.word[rows, _draw(column_log_probs, temperature, generator)]
        return words, State(hidden, words)

    # -- on disk --------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write model.safetensors, model.json and table.safetensors into `folder`, which is created if needed."""
        about = {"dimension": self.dimension, "layers": self.layers, "cell": self.cell, "tied": self.tied}
        about["dropout"] = self.dropout.p
        storage.save(folder, FORMAT, about, self, self.table)

    @classmethod
    def load(cls, folder: str | Path) -> LightRNN:
        """The model that `save` wrote, on the CPU.

        Raises:
            CheckpointError: a file is missing, damaged, or of another save.
        """
        return storage.load(folder, FORMAT, lambda about, table: cls(storage.required(table), **about))


def _vectors(count: int, dimension: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, dimension).uniform_(-SPREAD, SPREAD))


def _draw(log_probs: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """An index for each line of [B, n], shape [B]."""
    return torch.multinomial((log_probs / temperature).softmax(-1), 1, generator=generator)[:, 0]

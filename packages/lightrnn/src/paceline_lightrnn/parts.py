# SPDX-License-Identifier: Apache-2.0
"""Two-component layers for any torch model with a huge input or output layer.

::

    table = WordTable.random(100_000)                          # 317 rows x 316 columns
    embedding = TwoComponentEmbedding(table, 256)              # for nn.Embedding(100_000, 256)
    output = TwoComponentSoftmax(table, 256)                   # for nn.AdaptiveLogSoftmaxWithLoss(256, 100_000, ..)
    loss = output(body(embedding(ids)), targets).loss

Source of the idea: Li et al., "LightRNN", NIPS 2016; the replacement of the recurrent half-step is our own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import MismatchError, UnsupportedError
from paceline_lightrnn.ranking import Ranking, top_words
from paceline_lightrnn.table import WordTable
from paceline_lightrnn.tabled import Tabled

AT_ONCE = 1 << 22  # numbers: logits of rows and columns that `log_prob` computes at a time


class TwoComponentEmbedding(Tabled):
    """A replacement for `nn.Embedding`: a word's vector combines its row's vector and its column's.

    Initially a word's vector is normally distributed with variance 1, as in `nn.Embedding`.

    Args:
        table: the cells of the words; another table of the same shape may be assigned later.
        dimension: of a word's vector.
        combine: "sum" adds two vectors of `dimension` numbers; "concat" puts two of half as many side by side, with
            half the parameters.
        padding_idx: the word whose vector is always zero; None for none.

    Attributes:
        row: parameter [R, dimension], or half as wide.
        column: parameter [C, dimension], or half as wide.

    Raises:
        UnsupportedError: there is no such way to combine, or `dimension` cannot be halved.
        MismatchError: `padding_idx` is no word.
    """

    def __init__(
        self, table: WordTable, dimension: int, *, combine: str = "sum", padding_idx: int | None = None
    ) -> None:
        super().__init__(table)
        if combine not in ("sum", "concat"):
            raise UnsupportedError(f'combine is "sum" or "concat", got {combine!r}')
        if dimension < 1 or (combine == "concat" and dimension % 2):
            raise UnsupportedError(f"dimension is 1 at least, and even with concat; got {dimension}")
        if padding_idx is not None and not -table.words <= padding_idx < table.words:
            raise MismatchError(f"padding_idx is one of the words 0 to {table.words - 1}, got {padding_idx}")
        self.num_embeddings, self.embedding_dim, self.combine = table.words, dimension, combine
        self.padding_idx = padding_idx if padding_idx is None else padding_idx % table.words
        width, spread = (dimension, 0.5**0.5) if combine == "sum" else (dimension // 2, 1.0)
        self.row = nn.Parameter(spread * torch.randn(table.rows, width))
        self.column = nn.Parameter(spread * torch.randn(table.columns, width))

    def extra_repr(self) -> str:
        return f"{self.table}, {self.embedding_dim}, combine={self.combine}"

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors of shape [..., dimension] for words of any shape; MismatchError where (on the CPU) one is no word."""
        _check_range("words", ids, self.table.words)
        rows = F.embedding(self.table.row[ids], self.row)
        columns = F.embedding(self.table.column[ids], self.column)
        found = rows + columns if self.combine == "sum" else torch.cat((rows, columns), -1)
        return found if self.padding_idx is None else found.masked_fill((ids == self.padding_idx)[..., None], 0.0)


class Scores(NamedTuple):
    """What `TwoComponentSoftmax` returns, named as by `nn.AdaptiveLogSoftmaxWithLoss`.

    Attributes:
        output: log P of each target, of the targets' shape; 0 where the target is ignored.
        loss: the mean of -log P over the targets that are not ignored.
    """

    output: Tensor
    loss: Tensor


class TwoComponentSoftmax(Tabled):
    """A softmax over V words that costs as much as two over their square root; the face of the adaptive softmax.

    The row is predicted from the hidden vector h, the column from h and the row r::

        P(w | h) = P(row | h) P(column | g)
        g = z h + (1 - z) tanh(A h + a + u[r]),    z = sigmoid(B h + b + D u[r])

    g stands for the recurrent half-step, and is that of a gated unit. Without a nonlinearity a row could only shift the
    columns' logits by the same amounts in every context; the gate moreover lets a row put aside what h holds for the
    choice of rows only. (As the last layer of a trigram model of source text, 4096 words, the perplexity was 76 with
    g as here, 86 with h + tanh(A h + a + u), 94 with h + u, and 74 with a full softmax.) h and u meet in sums only,
    after their matrix products, so that to try another row costs additions and no d x d product, which `topk` and
    `log_prob` live on.

    Args:
        table: which word (class) has which cell; another one of the same shape may be assigned later.
        in_features: d, of the hidden vectors.
        ignore_index: targets of this value count neither in the loss nor in its gradient.
        dropout: share of the numbers of h and of g set to zero in training.
        embedding: a `TwoComponentEmbedding` of the same table's shape and d numbers per vector whose vectors this layer
            shares: for u, and for the output, where they are scaled by 1 / sqrt(d) as they are large. None for
            vectors of its own.

    Attributes:
        row_out: parameter [R, d].
        column_out: parameter [C, d].
        row_in: parameter [R, d], u above.
        step: nn.Linear, A over B, and a and b.
        row_gate: nn.Linear, D.

    Raises:
        UnsupportedError: a number makes no sense.
        MismatchError: the embedding does not fit.
    """

    def __init__(
        self,
        table: WordTable,
        in_features: int,
        *,
        ignore_index: int = -100,
        dropout: float = 0.0,
        embedding: TwoComponentEmbedding | None = None,
    ) -> None:
        super().__init__(table)
        if in_features < 1 or not 0 <= dropout < 1:
            raise UnsupportedError(
                f"in_features is 1 at least, dropout a share below 1; got {in_features} and {dropout}"
            )
        self.in_features, self.n_classes, self.ignore_index = in_features, table.words, ignore_index
        self.dropout = nn.Dropout(dropout)
        self.step = nn.Linear(in_features, 2 * in_features)
        self.row_gate = nn.Linear(in_features, in_features, bias=False)
        self.row_bias = nn.Parameter(torch.zeros(table.rows))
        self.column_bias = nn.Parameter(torch.zeros(table.columns))
        if embedding is None:
            self.scale = 1.0
            spread = in_features**-0.5  # as nn.Linear
            self.row_out = nn.Parameter(torch.empty(table.rows, in_features).uniform_(-spread, spread))
            self.column_out = nn.Parameter(torch.empty(table.columns, in_features).uniform_(-spread, spread))
            self.row_in = nn.Parameter(torch.randn(table.rows, in_features))
        else:
            wanted, found = (table.rows, table.columns, in_features), (*embedding.table.shape, embedding.row.shape[1])
            if wanted != found:
                raise MismatchError(
                    f"the layer has {wanted[0]} rows, {wanted[1]} columns and {wanted[2]} features, the embedding "
                    f"whose vectors it is to share {found[0]}, {found[1]} and {found[2]}; combine by sum, not concat"
                )
            self.scale = in_features**-0.5
            self.row_out = self.row_in = embedding.row
            self.column_out = embedding.column

    def extra_repr(self) -> str:
        return f"{self.table}, {self.in_features}"

    def forward(self, hidden: Tensor, target: Tensor) -> Scores:
        """log P of the targets, and the loss.

        Args:
            hidden: shape [..., d].
            target: shape [...], int64: words, or `ignore_index`.

        Raises:
            MismatchError: the shapes do not fit, or (on the CPU) a target is no word.
        """
        h_row, h_column = self.halves(hidden, target)
        counted = target != self.ignore_index
        known = target.masked_fill(~counted, 0)
        rows, columns = self.table.row[known], self.table.column[known]
        nll = self._row_nll(self.row_logits(h_row), rows)
        nll = nll + self._column_nll(self.column_logits(h_column), rows, columns)
        output = (-nll).masked_fill(~counted, 0.0)
        return Scores(output, -output.sum() / counted.sum().clamp(min=1))

    def halves(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """What predicts the targets' rows and, in these rows, their columns; arguments and errors as of `forward`.

        Returns:
            Two tensors of shape [..., d], for `row_logits` and `column_logits`; dropout has been applied.
        """
        known = target.masked_fill(target == self.ignore_index, 0)
        self._check(hidden, known)
        hidden = self.dropout(hidden)
        lines = self._of_rows(F.embedding(self.table.row[known], self.row_in))
        return hidden * self.scale, self._after_row(self.step(hidden), hidden, lines) * self.scale

    def row_logits(self, h_row: Tensor) -> Tensor:
        """The logit of every row, empty or not: [..., R] of what `halves` returned first."""
        return F.linear(h_row, self.row_out, self.row_bias)

    def column_logits(self, h_column: Tensor) -> Tensor:
        """The logit of every column, empty or not: [..., C] of what `halves` returned second."""
        return F.linear(h_column, self.column_out, self.column_bias)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """log P of every word, shape [N, V] of hidden [N, d]; computes all rows."""
        table, count = self.table, hidden.shape[0]
        hidden = self.dropout(hidden)
        row_log_probs, mixed, lines = self._row_log_probs(hidden), self.step(hidden), self._of_rows(self.row_in)
        some = max(1, AT_ONCE // (max(1, count) * max(table.columns, self.in_features)))
        found = []
        for rows in torch.split(torch.arange(table.rows, device=hidden.device), some):
            after = self._after_row(mixed[:, None], hidden[:, None], lines[rows])
            logits = self._mask_columns(self.column_logits(after * self.scale), rows.expand(count, -1))
            found.append(logits.log_softmax(-1) + row_log_probs[:, rows, None])
        return torch.cat(found, 1).flatten(1)[:, table.cells]

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable words [N, k] of hidden [N, d], and their log-probabilities: exact; see `rank`."""
        return self.rank(hidden, k)[:2]

    @torch.no_grad()
    def rank(self, hidden: Tensor, k: int) -> Ranking:
        """`topk`, and the number of tried rows."""
        hidden = self.dropout(hidden)
        mixed, lines = self.step(hidden), self._of_rows(self.row_in)

        def columns(places: Tensor, rows: Tensor) -> Tensor:
            after = self._after_row(mixed[places], hidden[places], lines[rows])
            return self._mask_columns(self.column_logits(after * self.scale), rows).log_softmax(-1)

        return top_words(self._row_log_probs(hidden), columns, self.table, k)

    def predict(self, hidden: Tensor) -> Tensor:
        """The most probable word of each hidden vector, shape [N] of [N, d]; few rows are tried."""
        return self.rank(hidden, 1).words[:, 0]

    def _row_log_probs(self, hidden: Tensor) -> Tensor:
        return self._mask_rows(self.row_logits(hidden * self.scale)).log_softmax(-1)

    def _of_rows(self, vectors: Tensor) -> Tensor:
        """u and D u, [..., 2 d] of u [..., d]."""
        return torch.cat((vectors, self.row_gate(vectors)), -1)

    def _after_row(self, mixed: Tensor, hidden: Tensor, lines: Tensor) -> Tensor:
        """g above, of A h + a and B h + b side by side, of h, and of `_of_rows`."""
        change, gate = (mixed + lines).chunk(2, -1)
        gate = gate.sigmoid()
        found: Tensor = gate * hidden + (1 - gate) * self.dropout(change.tanh())
        return found

    def _check(self, hidden: Tensor, target: Tensor) -> None:
        if hidden.shape != (*target.shape, self.in_features):
            raise MismatchError(
                f"targets of shape {tuple(target.shape)} want hidden vectors of shape "
                f"{(*target.shape, self.in_features)}, got {tuple(hidden.shape)}"
            )
        _check_range("targets", target, self.table.words)


def _check_range(what: str, ids: Tensor, words: int) -> None:
    """Check on the CPU only, since a GPU would have to synchronise. Indexing alone takes -1 as the last word."""
    if ids.device.type == "cpu" and ids.numel():
        low, high = (int(value) for value in ids.aminmax())
        if low < 0 or high >= words:
            raise MismatchError(f"{what} are 0 to {words - 1}, got {low} to {high}")

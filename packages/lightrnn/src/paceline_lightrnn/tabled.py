# SPDX-License-Identifier: Apache-2.0
"""Base of modules with a word table: the table can be replaced, moves with the module, and masks empty cells.

The table is a plain attribute and not a buffer, since buffers are averaged over workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from paceline import MismatchError
from paceline_lightrnn.state import wide
from paceline_lightrnn.table import EMPTY, WordTable


class Tabled(nn.Module):
    """A module that has a `WordTable`.

    Args:
        table: the cells of the words.
    """

    def __init__(self, table: WordTable) -> None:
        super().__init__()
        self._place(table)

    @property
    def table(self) -> WordTable:
        """The cells of the words; assign another table of the same shape after a re-allocation."""
        return self._table

    @table.setter
    def table(self, table: WordTable) -> None:
        old, new = (self._table.words, *self._table.shape), (table.words, *table.shape)
        if old != new:
            raise MismatchError(
                f"the model's table has {old[0]} words in {old[1]} x {old[2]} cells, the new one {new[0]} in "
                f"{new[1]} x {new[2]}; make it with `model.table.with_cells(cells)`"
            )
        self._place(table.to(self._table.cells.device))

    def _place(self, table: WordTable) -> None:
        self._table = table
        self._no_word: Tensor | None = None  # [R, C]
        self._no_words: Tensor | None = None  # [R]
        if not table.full:
            self._no_word = table.word == EMPTY
            self._no_words = self._no_word.all(1) if bool(self._no_word.all(1).any()) else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = next(self.parameters()).device
        if device.type != "meta" and device != self._table.cells.device:
            self._place(self._table.to(device))
        return result

    def _row_nll(self, logits: Tensor, rows: Tensor) -> Tensor:
        """-log P(row), shape as `rows`, of logits [..., R]."""
        return _nll(self._mask_rows(logits), rows)

    def _column_nll(self, logits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """-log P(column), shape as `columns`, of logits [..., C] and the rows in which the columns lie."""
        return _nll(self._mask_columns(logits, rows), columns)

    def _mask_rows(self, logits: Tensor) -> Tensor:
        """The logits [..., R] in float32 at least, minus infinity for empty rows. May write into `logits`."""
        logits = wide(logits)
        return logits if self._no_words is None else logits.masked_fill_(self._no_words, -float("inf"))

    def _mask_columns(self, logits: Tensor, rows: Tensor) -> Tensor:
        """The logits [..., C] likewise, minus infinity where the row, shape [...], is empty in this column."""
        logits = wide(logits)
        if self._no_word is None:
            return logits
        holes = self._no_word.index_select(0, rows.flatten()).view(logits.shape)
        return logits.masked_fill_(holes, -float("inf"))


def _nll(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)

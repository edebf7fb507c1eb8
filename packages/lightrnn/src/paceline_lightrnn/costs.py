# SPDX-License-Identifier: Apache-2.0
"""The cost of each word in each row and each column of the table, summed over a text.

The cost of word w in row i is the sum over its positions of `-log P(row i | before)`, in column j of `-log P(column j
| before, the word's row)` (Li et al., "LightRNN", NIPS 2016, section 3.3). `DenseCosts` holds these sums;
`FactoredCosts` holds their factors and is linear in the words: with `log P(row i) = h . y_i + b_i - z` the
sum over the positions of w is `Z_w - S_w . y_i - n_w b_i`, where S_w is the sum of the states h, n_w the count and
Z_w the sum of the normalisers z. This is exact while the model's weights do not change.

The normalisers are those of the model's current table, without empty rows and cells. A column whose cell in the current
row is empty has a cost by the same formula, so that words may move there.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from paceline import MismatchError
from paceline_lightrnn.table import EMPTY, WordTable


@runtime_checkable
class CostSource(Protocol):
    """Costs of words by rows and by columns, for some words at a time.

    Attributes:
        words: V.
        rows: R.
        columns: C.
    """

    words: int
    rows: int
    columns: int

    def row_costs(self, words: np.ndarray) -> np.ndarray:
        """Costs in every row, shape (n, R), float32, for words of shape (n,), int64."""
        ...

    def column_costs(self, words: np.ndarray) -> np.ndarray:
        """Costs in every column, shape (n, C), float32, for words of shape (n,), int64."""
        ...


class OutputLayers(Protocol):
    """What the costs need from a model such as `LightRNN`."""

    @property
    def table(self) -> WordTable:
        """The cells of the words."""

    @property
    def row_out(self) -> Tensor:
        """Shape (R, d)."""

    @property
    def column_out(self) -> Tensor:
        """Shape (C, d)."""

    @property
    def row_bias(self) -> Tensor:
        """Shape (R,)."""

    @property
    def column_bias(self) -> Tensor:
        """Shape (C,)."""

    def row_logits(self, h: Tensor) -> Tensor:
        """Shape (..., R), from states of shape (..., d)."""
        ...

    def column_logits(self, h: Tensor) -> Tensor:
        """Shape (..., C), from states of shape (..., d)."""
        ...


class DenseCosts:
    """The sums themselves: `4 V (R + C)` bytes, for small vocabularies and for tests.

    Args:
        words: V.
        rows: R.
        columns: C.
        device: of the sums; the model's.
    """

    def __init__(self, words: int, rows: int, columns: int, *, device: torch.device | str = "cpu") -> None:
        self.row, self.column = torch.zeros(words, rows, device=device), torch.zeros(words, columns, device=device)

    @torch.no_grad()
    def add(self, model: OutputLayers, words: Tensor, h_row: Tensor, h_column: Tensor) -> None:
        """Add a batch of positions.

        Args:
            model: in eval mode.
            words: shape (B, T), int64; below 0 is padding.
            h_row: shape (B, T, d): the states that predict the rows of the words.
            h_column: shape (B, T, d): the states that predict their columns.
        """
        words, h_row, h_column = _positions(words, h_row, h_column, len(self.row))
        for total, (logits, z) in zip((self.row, self.column), _outputs(model, words, h_row, h_column), strict=True):
            total.index_add_(0, words, z[:, None] - logits)

    def tensors(self) -> list[Tensor]:
        """The tensors to sum over workers in place: shapes (V, R) and (V, C), float32."""
        return [self.row, self.column]

    def source(self, model: OutputLayers | None = None) -> CostSource:
        """The costs for re-allocation."""
        return _DenseSource(self.row, self.column)


class FactoredCosts:
    """Sums of states, counts and normalisers: about `8 V d` bytes, whatever the table's shape.

    Args:
        words: V.
        dimension: d, the size of the states.
        device: of the sums; the model's.
    """

    def __init__(self, words: int, dimension: int, *, device: torch.device | str = "cpu") -> None:
        self.row, self.column = (torch.zeros(words, dimension, device=device) for _ in range(2))
        # Long sums of numbers of one sign: float64, since float32 would stop growing at 2**24 positions of a word.
        self.count, self.row_norm, self.column_norm = (
            torch.zeros(words, dtype=torch.float64, device=device) for _ in range(3)
        )
        self._weights: list[float] | None = None

    @torch.no_grad()
    def add(self, model: OutputLayers, words: Tensor, h_row: Tensor, h_column: Tensor) -> None:
        """Add a batch of positions; arguments as in `DenseCosts.add`."""
        if self._weights is None:
            self._weights = _digest(model)
        words, h_row, h_column = _positions(words, h_row, h_column, len(self.row))
        self.row.index_add_(0, words, h_row)
        self.column.index_add_(0, words, h_column)
        self.count.index_add_(0, words, torch.ones_like(words, dtype=torch.float64))
        row, column = _outputs(model, words, h_row, h_column)
        self.row_norm.index_add_(0, words, row[1].double())
        self.column_norm.index_add_(0, words, column[1].double())

    def tensors(self) -> list[Tensor]:
        """The tensors to sum over workers in place: (V, d) twice, float32, and (V,) three times, float64."""
        return [self.row, self.column, self.count, self.row_norm, self.column_norm]

    def source(self, model: OutputLayers) -> CostSource:
        """The costs under the model's output vectors.

        Raises:
            MismatchError: the output vectors are not those that the costs were gathered with.
        """
        if self._weights is not None and self._weights != _digest(model):
            raise MismatchError(
                "the model's output vectors changed after the costs were gathered; gather all costs with frozen "
                "weights and ask for their source before training goes on"
            )
        return _FactoredSource(self, model)


class _DenseSource:
    def __init__(self, row: Tensor, column: Tensor) -> None:
        self._row, self._column = row, column
        self.words, self.rows, self.columns = row.shape[0], row.shape[1], column.shape[1]

    def row_costs(self, words: np.ndarray) -> np.ndarray:
        return _numpy(self._row[_index(words, self._row)])

    def column_costs(self, words: np.ndarray) -> np.ndarray:
        return _numpy(self._column[_index(words, self._column)])


class _FactoredSource:
    def __init__(self, sums: FactoredCosts, model: OutputLayers) -> None:
        self._sums = sums
        outputs = (model.row_out, model.row_bias, model.column_out, model.column_bias)
        self._out = [x.detach().to(sums.row.device, torch.float32).clone() for x in outputs]
        self.words, self.rows, self.columns = len(sums.row), len(self._out[0]), len(self._out[2])

    def row_costs(self, words: np.ndarray) -> np.ndarray:
        return self._costs(words, self._sums.row, self._sums.row_norm, self._out[0], self._out[1])

    def column_costs(self, words: np.ndarray) -> np.ndarray:
        return self._costs(words, self._sums.column, self._sums.column_norm, self._out[2], self._out[3])

    def _costs(self, words: np.ndarray, state: Tensor, norm: Tensor, out: Tensor, bias: Tensor) -> np.ndarray:
        at = _index(words, state)
        cost = torch.addmm(norm[at].float()[:, None], state[at], out.T, alpha=-1)
        return _numpy(cost.addr_(self._sums.count[at].float(), bias, alpha=-1))


def _index(words: np.ndarray, beside: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(words, np.int64)).to(beside.device)


def _numpy(x: Tensor) -> np.ndarray:
    out: np.ndarray = x.cpu().numpy()
    return out


def _digest(model: OutputLayers) -> list[float]:
    """Two sums of each output tensor: other weights have others."""
    tensors = (model.row_out, model.row_bias, model.column_out, model.column_bias)
    return [float(y) for x in tensors for y in (x.detach().double().sum(), x.detach().double().square().sum())]


def _positions(words: Tensor, h_row: Tensor, h_column: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """The positions that are no padding, flat, with their states in float32."""
    if h_row.shape[:-1] != words.shape or h_column.shape != h_row.shape:
        raise MismatchError(
            f"states have the shape of the words and one more dimension; got words {tuple(words.shape)}, "
            f"h_row {tuple(h_row.shape)} and h_column {tuple(h_column.shape)}"
        )
    known = words >= 0
    flat = words[known]
    if flat.numel() and int(flat.max()) >= vocabulary:
        raise MismatchError(f"words are 0 to {vocabulary - 1}, got {int(flat.max())}; make the costs for all words")
    return flat, h_row[known].float(), h_column[known].float()


def _outputs(
    model: OutputLayers, words: Tensor, h_row: Tensor, h_column: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Logits and log normalisers of rows and of columns, without empty rows and cells."""
    table = model.table.to(words.device)
    taken = table.word != EMPTY
    row, column = model.row_logits(h_row).float(), model.column_logits(h_column).float()
    if table.full:
        return (row, row.logsumexp(-1)), (column, column.logsumexp(-1))
    rows = row.masked_fill(~taken.any(1), -torch.inf).logsumexp(-1)
    columns = column.masked_fill(~taken[table.row[words]], -torch.inf).logsumexp(-1)
    return (row, rows), (column, columns)

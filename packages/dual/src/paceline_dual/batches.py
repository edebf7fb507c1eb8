# SPDX-License-Identifier: Apache-2.0
"""The data of a training of a pair, and endless batches of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline import DataError, Run
from paceline_dual.sequences import PADDING, pad, trim

Pairs = tuple[Tensor, Tensor] | Dataset[tuple[Tensor, Tensor]]
Side = Tensor | Dataset[Tensor]


@dataclass(frozen=True)
class Data:
    """Training and held-out data of a pair.

    Each is a tensor (or two) whose rows are samples, or a map-style torch data set. Sequences are int64 tensors of any
    length, padded at the end or not; labels are int64 numbers; anything else is stacked.

    Attributes:
        labelled: pairs (x, y).
        heldout: pairs that are not trained on.
        x: unlabelled samples of x, or None.
        y: unlabelled samples of y, or None.
    """

    labelled: Pairs
    heldout: Pairs
    x: Side | None = None
    y: Side | None = None


def pairs_of(pairs: Pairs, what: str, least: int) -> Dataset[Any]:
    """Pairs as a data set; DataError if there are fewer than `least`, or the sides differ in length."""
    if isinstance(pairs, tuple):
        x, y = pairs
        if len(x) != len(y):
            raise DataError(f"{what} has {len(x)} samples of x and {len(y)} of y; give as many of each, in pairs")
        pairs = cast("Dataset[tuple[Tensor, Tensor]]", TensorDataset(x, y))
    _check_number(pairs, what, least)
    return pairs


def side_of(side: Side, what: str, least: int) -> Dataset[Any]:
    """Samples of one side as a data set; DataError if there are fewer than `least`."""
    if isinstance(side, Tensor):
        side = cast("Dataset[Tensor]", _Rows(side))
    _check_number(side, what, least)
    return side


def _check_number(data: Any, what: str, least: int) -> None:
    if len(data) < least:
        raise DataError(f"{what} has {len(data)} samples, and at least {least} are needed: one for each worker")


class _Rows(Dataset[Tensor]):
    """The rows of a tensor."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, k: int) -> Tensor:
        return self._rows[k]


def collate(rows: Sequence[Any]) -> Any:
    """Samples as a batch: parts are stacked, sequences padded to the longest of the batch."""
    if isinstance(rows[0], (tuple, list)):
        return tuple(_stack(list(column)) for column in zip(*rows, strict=True))
    return _stack(list(rows))


def _stack(rows: list[Any]) -> Tensor:
    tensors = [row if isinstance(row, Tensor) else torch.as_tensor(row) for row in rows]
    if not _is_sequence(tensors[0]):
        return torch.stack(tensors)
    if len({len(row) for row in tensors}) == 1:
        return trim(torch.stack(tensors))
    return pad([row[row != PADDING].tolist() for row in tensors])


def _is_sequence(row: Tensor) -> bool:
    return row.dtype == torch.int64 and row.dim() == 1


class Endless:
    """This worker's batches of a data set, pass after pass.

    Args:
        run: shares them among the workers; all get as many, under every rule.
        data: the data set.
        batch: samples of a batch.
    """

    def __init__(self, run: Run, data: Dataset[Any], batch: int) -> None:
        self._share = run.share(DataLoader(data, batch, shuffle=True, collate_fn=collate), even=True)
        self._pass: Iterator[Any] | None = None

    def next(self, device: torch.device) -> Any:
        """The next batch, a tensor or two."""
        while True:
            if self._pass is None:
                self._pass = iter(self._share)
            for batch in self._pass:
                return tuple(x.to(device) for x in batch) if isinstance(batch, tuple) else batch.to(device)
            self._pass = None

    def close(self) -> None:
        """Leave the open pass."""
        if isinstance(self._pass, Generator):
            self._pass.close()
        self._pass = None

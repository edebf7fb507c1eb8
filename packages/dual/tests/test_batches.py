# SPDX-License-Identifier: Apache-2.0
"""Data of a training: batches, data sets and tensors; what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dual_helpers import simulate
from paceline import DataError
from paceline_dual import evaluation
from paceline_dual.batches import Data, collate
from paceline_dual.sequences import PADDING
from paceline_dual.training import train
from running import trained
from tasks import COURSE, draw, labels_data, sequences, words_pair


class Ragged(Dataset[Any]):
    """Pairs of sequences, each as long as it is."""

    def __init__(self, rows: list[tuple[list[int], list[int]]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> Any:
        return tuple(torch.tensor(side, dtype=torch.int64) for side in self.rows[k])


class Side(Dataset[Tensor]):
    """Sequences of one side."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> Tensor:
        return self.rows[k]


def test_batches_are_as_wide_as_their_longest_sequence() -> None:
    data = Ragged([([1, 2], [0]), ([2], []), ([0, 1, 1], [2, 2])])
    x, y = collate([data[k] for k in range(3)])
    assert x.tolist() == [[1, 2, PADDING], [2, PADDING, PADDING], [0, 1, 1]]
    assert y.tolist() == [[0, PADDING], [PADDING, PADDING], [2, 2]]
    wide = torch.full((2, 9), PADDING)
    wide[0, :2] = torch.tensor([1, 2])
    assert collate(list(wide)).tolist() == [[1, 2], [PADDING, PADDING]]
    assert collate([torch.tensor(3), torch.tensor(1)]).tolist() == [3, 1]
    assert collate([torch.zeros(2, 3)] * 4).shape == (4, 2, 3)


def test_data_sets_serve_as_well_as_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "check_warm", lambda row, warm: None)
    rows = [([k % 3, (k + 1) % 3][: 1 + k % 2], [k % 3]) for k in range(12)]
    both = Side(sequences(5, 1))
    data = Data(Ragged(rows), Ragged(rows[:3]), both, both)  # one object for both sides
    pair = words_pair()
    found = train(pair, data, replace(COURSE, warm=1, steps=2), tmp_path)
    assert found[-1]["step"] == 3 and len(found[-1]["translations"]) == 4


def test_data_that_cannot_be_are_refused(tmp_path: Path) -> None:
    data = labels_data()
    with pytest.raises(DataError, match="none of x nor of y"):
        trained(tmp_path, data=replace(data, x=None, y=None))
    with pytest.raises(DataError, match="40 samples of x and 3 of y"):
        trained(tmp_path, data=replace(data, labelled=(draw(40, 1), draw(3, 1))))
    with pytest.raises(DataError, match="held-out part has 0 samples"):
        trained(tmp_path, data=replace(data, heldout=(draw(0, 1), draw(0, 1))))
    with pytest.raises(DataError, match="unlabelled part of x has 2 samples, and at least 3"):
        simulate(lambda: trained(tmp_path, data=replace(data, x=draw(2, 1))), 3)
    assert trained(tmp_path, replace(COURSE, method="supervised"), data=replace(data, x=None, y=None))

# SPDX-License-Identifier: Apache-2.0
"""Sequences as padded tensors, and candidates beside their sources."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import MismatchError
from paceline_dual import protocols, sequences

LISTS = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=5)


@given(LISTS)
def test_padding_and_back_changes_nothing(lists: list[list[int]]) -> None:
    x = sequences.pad(lists)
    assert x.dtype == torch.int64 and x.shape == (len(lists), max(map(len, lists), default=0))
    assert sequences.unpad(x) == lists
    assert sequences.lengths(x).tolist() == [len(row) for row in lists]
    assert sequences.mask(x).sum(-1).tolist() == [len(row) for row in lists]


@given(LISTS, LISTS)
def test_the_same_width_holds_the_same_sequences(a: list[list[int]], b: list[list[int]]) -> None:
    left, right = sequences.same_width([sequences.pad(a), sequences.pad(b)])
    assert left.shape[1] == right.shape[1]
    assert sequences.unpad(left) == a and sequences.unpad(right) == b


def test_trimming_leaves_out_what_is_padding_in_all_rows() -> None:
    x = torch.tensor([[1, -1, -1, -1], [2, 3, -1, -1]])
    assert sequences.trim(x).tolist() == [[1, -1], [2, 3]]
    assert sequences.trim(x[None]).shape == (1, 2, 2)
    assert sequences.trim(torch.full((2, 3), -1)).shape == (2, 0)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(2, 2), "int64"),
        (torch.zeros(2, dtype=torch.int64), "int64"),
        (torch.tensor([[0, 5]]), "symbol 5"),
        (torch.tensor([[0, -2]]), "symbol -2"),
        (torch.tensor([[0, -1, 1]]), "padding before a symbol"),
        (torch.tensor([[0, 0, 0, 0]]), "4 symbols, this model writes 3"),
    ],
)
def test_what_is_no_sequence_is_refused(x: torch.Tensor, words: str) -> None:
    with pytest.raises(MismatchError, match=words):
        sequences.check(x, 5, 3)


def test_a_negative_symbol_does_not_become_padding() -> None:
    with pytest.raises(MismatchError, match="sequence 1 has the symbol -1"):
        sequences.pad([[0], [1, -1]])


def test_candidates_lie_as_their_sources_are_repeated() -> None:
    x = torch.tensor([[0, 1], [2, 3]])
    y = x[:, None].expand(2, 3, 2)
    assert torch.equal(protocols.flat(y), protocols.repeat(x, 3))


def test_undisturbed_gives_every_part_its_mode_back() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.BatchNorm1d(2))
    model[1].eval()
    with protocols.undisturbed(model):
        assert not any(part.training for part in model.modules())
        assert not torch.is_grad_enabled()
    assert model.training and model[0].training and not model[1].training
    assert torch.is_grad_enabled()

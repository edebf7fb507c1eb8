# SPDX-License-Identifier: Apache-2.0
"""Sampling and the beam, against models all of whose sequences can be counted."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from paceline_dual import search
from paceline_dual.sequences import pad, unpad

SIZES = [(1, 3), (2, 3), (3, 2), (2, 1)]


class Chain(search.Steps):
    """P(symbol | the one before, the input): rows of a table [B, words + 1, words + 1]."""

    def __init__(self, table: Tensor, longest: int, k: int) -> None:
        self.table, self.longest, self.words, self.k = table.log_softmax(-1), longest, table.shape[-1] - 1, k
        self.history: Tensor | None = None
        self.steps = 0

    def step(self, last: Tensor) -> Tensor:
        self.steps += 1
        assert last.shape == (len(self.table), self.k)
        self.history = last[..., None] if self.history is None else torch.cat((self.history, last[..., None]), -1)
        return self.table.gather(1, last[..., None].expand(*last.shape, self.words + 1))

    def reorder(self, rows: Tensor) -> None:
        assert self.history is not None
        self.history = self.history.gather(1, rows[..., None].expand_as(self.history))

    def keep(self, inputs: Tensor) -> None:
        assert self.history is not None
        self.table, self.history = self.table[inputs], self.history[inputs]


def everything(words: int, longest: int) -> list[list[int]]:
    """All sequences of up to `longest` symbols."""
    return [list(s) for n in range(longest + 1) for s in itertools.product(range(words), repeat=n)]


def log_prob(table: Tensor, y: list[int], longest: int) -> float:
    path = [table.shape[-1] - 1, *y] + ([table.shape[-1] - 1] if len(y) < longest else [])
    return float(sum(table.log_softmax(-1)[a, b] for a, b in itertools.pairwise(path)))


@pytest.mark.parametrize(("words", "longest"), SIZES)
def test_a_beam_as_wide_as_all_there_is_ranks_exactly(words: int, longest: int) -> None:
    table = torch.randn(3, words + 1, words + 1, dtype=torch.float64)
    every = everything(words, longest)
    k = len(every) + 2
    found, log_probs = search.beam(Chain(table, longest, k), 3, k, torch.device("cpu"))
    for b in range(3):
        exact = sorted(every, key=lambda y: -log_prob(table[b], y, longest))
        assert unpad(found[b])[:-2] == exact
        wanted = torch.tensor([log_prob(table[b], y, longest) for y in exact], dtype=torch.float64)
        torch.testing.assert_close(log_probs[b, :-2], wanted)
        assert log_probs[b, :-2].exp().sum().item() == pytest.approx(1)
    assert bool((found[:, -2:] == -1).all()) and bool(log_probs[:, -2:].isneginf().all())


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_narrow_beam_tells_the_truth_about_what_it_finds(k: int) -> None:
    table = torch.randn(20, 5, 5, dtype=torch.float64) * 2
    found, log_probs = search.beam(Chain(table, 6, k), 20, k, torch.device("cpu"))
    for b in range(20):
        candidates = unpad(found[b])
        assert len({tuple(y) for y in candidates}) == k
        wanted = torch.tensor([log_prob(table[b], y, 6) for y in candidates], dtype=torch.float64)
        torch.testing.assert_close(log_probs[b], wanted)
        assert log_probs[b].tolist() == sorted(log_probs[b].tolist(), reverse=True)


def test_a_beam_finds_what_a_greedy_search_misses() -> None:
    # Symbol 0 looks better at first (0.6), but what follows it is spread over many.
    table = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [1e-9, 1e-9, 1.0], [0.6, 0.4, 1e-9]]).log()[None]
    greedy, _ = search.beam(Chain(table, 3, 1), 1, 1, torch.device("cpu"))
    wider, log_probs = search.beam(Chain(table, 3, 2), 1, 2, torch.device("cpu"))
    assert unpad(greedy[0])[0][0] == 0
    assert unpad(wider[0])[0] == [1]
    assert log_probs[0, 0].exp().item() == pytest.approx(0.4)


def test_a_beam_stops_when_nothing_can_overtake() -> None:
    table = torch.zeros(4, 3, 3)
    table[..., -1] = 5  # the end is likely everywhere
    steps = Chain(table, 50, 1)
    found, _ = search.beam(steps, 4, 1, torch.device("cpu"))
    assert found.shape == (4, 1, 0) and steps.steps == 1


def test_samples_follow_the_exact_distribution() -> None:
    draws, words, longest = 4000, 2, 3
    table = torch.randn(2, words + 1, words + 1)
    every = everything(words, longest)
    found = search.sample(Chain(table, longest, draws), 2, draws, torch.device("cpu"), torch.Generator().manual_seed(1))
    for b in range(2):
        drawn = [tuple(y) for y in unpad(found[b])]
        seen = [drawn.count(tuple(y)) for y in every]
        wanted = [draws * 2.718281828459045 ** log_prob(table[b], y, longest) for y in every]
        total = sum(wanted)
        assert total == pytest.approx(draws, rel=1e-4)
        assert chisquare(seen, [w * sum(seen) / total for w in wanted]).pvalue > 0.01
        assert sum(seen) == draws


def test_inputs_that_end_early_leave_the_others_alone() -> None:
    table = torch.full((8, 3, 3), -30.0)
    table[:, 2, 0] = table[:, 0, 1] = table[:, 1, 0] = 0.0  # 0 1 0 1 ... for ever
    table[:6] = -30.0
    table[:6, 2, 2] = 0.0  # ends at once
    for k in (1, 3):
        found = search.sample(Chain(table, 5, k), 8, k, torch.device("cpu"), None)
        assert unpad(found[:, 0]) == [[]] * 6 + [[0, 1, 0, 1, 0]] * 2
        best, _ = search.beam(Chain(table, 5, k), 8, k, torch.device("cpu"))
        assert unpad(best[:, 0]) == [[]] * 6 + [[0, 1, 0, 1, 0]] * 2


def test_a_symbol_without_probability_is_never_drawn() -> None:
    log_probs = torch.tensor([-torch.inf, 0.5, -torch.inf, 0.5, -torch.inf]).log_softmax(-1).expand(500, 4, 5)
    drawn = search._draw(log_probs, torch.Generator().manual_seed(0))
    assert sorted(set(drawn.flatten().tolist())) == [1, 3]


def test_nothing_is_asked_of_a_model_without_inputs() -> None:
    empty = torch.zeros(0, 3, 3)
    assert search.sample(Chain(empty, 4, 2), 0, 2, torch.device("cpu"), None).shape == (0, 2, 0)
    found, log_probs = search.beam(Chain(empty, 4, 2), 0, 2, torch.device("cpu"))
    assert found.shape == (0, 2, 0) and log_probs.shape == (0, 2)
    assert pad([]).shape == (0, 0)

# SPDX-License-Identifier: Apache-2.0
"""The diversity of displacements: its equation, and that of block momentum amplified by it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import RuleError
from paceline.rules import BlockMomentum
from paceline.rules.outer.base import Coefficients
from paceline.rules.outer.diversity import ratio


def ratio_of(displacements: Tensor) -> float:
    """Of displacements, shape (N, n)."""
    mean_norm, norm_of_mean = float(displacements.norm(dim=1).mean()), float(displacements.mean(0).norm())
    return ratio(mean_norm, norm_of_mean, len(displacements))


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 1000))
def test_it_lies_between_alike_and_independent(workers: int, numbers: int, seed: int) -> None:
    d = torch.randn(workers, numbers, generator=torch.Generator().manual_seed(seed))
    assert 1.0 <= ratio_of(d) <= math.sqrt(workers) + 1e-6


def test_workers_that_say_the_same_are_worth_one() -> None:
    assert ratio_of(torch.ones(8, 5)) == pytest.approx(1.0)


@pytest.mark.parametrize("norms", [(0.0, 0.0), (1.0, 0.0), (math.inf, 1.0), (math.nan, 1.0), (1.0, math.nan)])
def test_nothing_to_compare_is_one(norms: tuple[float, float]) -> None:
    assert ratio(*norms, 4) == 1.0


def test_block_momentum_takes_a_longer_displacement() -> None:
    """Delta = eta Delta + zeta A^p d, theta = theta + Delta."""
    outer, anchor, state = BlockMomentum(0.5, 0.8, amplify=0.5), torch.zeros(3), {"delta": torch.ones(3)}
    c = Coefficients(0.5, 0.8, 0.5, 0.5, diversity=4.0)
    outer.step(anchor, torch.full((3,), 2.0), state, c, torch.empty(3))
    torch.testing.assert_close(anchor, torch.full((3,), 0.5 * 1 + 0.8 * 2 * 2.0))


@pytest.mark.parametrize("power", [-0.1, 1.5, True, "0.5", math.nan])
def test_a_power_outside_0_to_1_is_refused(power: object) -> None:
    with pytest.raises(RuleError, match="amplify must be a number from 0 to 1"):
        BlockMomentum(amplify=power)  # type: ignore[arg-type]

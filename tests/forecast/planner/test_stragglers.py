# SPDX-License-Identifier: Apache-2.0
"""The slowest of N: hand-solvable cases, and formulas against draws."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import RuleError
from paceline_plugins.forecast.planner.stragglers import (
    LogNormal,
    Measured,
    maximum_weights,
    step_times,
)


def test_the_largest_of_normal_numbers() -> None:
    """1/sqrt(pi) of two, 3/(2 sqrt(pi)) of three (David & Nagaraja, table of section 3.1)."""
    expected = {2: 1 / np.sqrt(np.pi), 3: 1.5 / np.sqrt(np.pi), 1024: 3.2486}
    for workers, mean in expected.items():
        z, weight = maximum_weights(workers)
        assert np.sum(weight) == pytest.approx(1, abs=1e-9)
        assert np.sum(weight * z) == pytest.approx(mean, abs=2e-3)


@pytest.mark.parametrize("workers", [2, 16, 256])
def test_the_largest_of_lognormal_numbers_against_draws(workers: int) -> None:
    steps = LogNormal(0.2, 0.5)
    drawn = steps.sums(1, (4000, workers), np.random.default_rng(0)).max(axis=1).mean()
    assert steps.slowest(1, workers) == pytest.approx(drawn, rel=0.02)


def test_the_slowest_of_measured_times_by_hand() -> None:
    """Of two throws of a coin with 1 and 3, three in four have a 3."""
    steps = Measured((1.0, 3.0))
    assert steps.slowest(1, 2) == pytest.approx(0.25 * 1 + 0.75 * 3)
    assert steps.slowest(2, 2) == pytest.approx((1 * 2 + 8 * 4 + 7 * 6) / 16, rel=0.02)  # sums 2, 4, 4, 6
    assert steps.mean_s == 2 and steps.variation == pytest.approx(np.sqrt(2) / 2)
    assert steps.slowest(40, 1) == 80


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RuleError, match="step time must be"):
        LogNormal(0.0)
    with pytest.raises(RuleError, match="spread"):
        LogNormal(0.1, -1)
    assert step_times(0.1, 0.2) == LogNormal(0.1, 0.2)
    assert step_times(0.1, 0.2, [1.0, 2.0]) == Measured((1.0, 2.0))

# SPDX-License-Identifier: Apache-2.0
"""The slowest of N: hand-solvable cases, and formulas against draws."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import RuleError
from paceline_plugins.forecast.planner.stragglers import LogNormal, maximum_weights


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


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RuleError, match="step time must be"):
        LogNormal(0.0)
    with pytest.raises(RuleError, match="spread"):
        LogNormal(0.1, -1)

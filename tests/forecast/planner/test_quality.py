# SPDX-License-Identifier: Apache-2.0
"""The forecast of quality: its equations by hand, and what it takes from a log."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.errors import RuleError
from paceline.observe.reports.events import GenerationEvent
from paceline.rules.outer.diversity import effective_workers, ratio
from paceline.rules.recipes import rule_from_text
from paceline_plugins.forecast.plan_command.quality import quality_forecast
from paceline_plugins.forecast.planner.observed import observed, step_s
from paceline_plugins.forecast.planner.quality import (
    ObservedRun,
    correlation,
    effective_of,
    fitted_alpha,
    forecast_quality,
)

from .examples import run_log

AVERAGING = rule_from_text("averaging(period=8)")
BLOCKS = 32
MADE = np.arange(1.0, BLOCKS + 1) * 32
"""Minibatches of 4 workers by the end of each block of 8."""


def measured(noise: float, workers: int) -> float:
    """E of displacements with a common part of length 1, and noise of this length that is independent of all others."""
    displacements = torch.eye(65, dtype=torch.float64)[1 : workers + 1] * noise
    displacements[:, 0] = 1
    mean_norm, norm_of_mean = float(displacements.norm(dim=1).mean()), float(displacements.mean(0).norm())
    return effective_workers(ratio(mean_norm, norm_of_mean, workers))


@pytest.mark.parametrize("noise", [0.5, 2.0, 5.0])
def test_few_workers_tell_how_many_more_are_worth(noise: float) -> None:
    c = correlation(measured(noise, 4), 4)
    assert c == pytest.approx(1 / (1 + noise**2))
    for workers in (1, 4, 16, 64):
        assert effective_of(c, workers) == pytest.approx(measured(noise, workers))
        scale = 1 / c - 1
        assert effective_of(c, workers) == pytest.approx(workers * (1 + scale) / (workers + scale))  # 1812.06162


def test_workers_that_are_all_alike_and_all_independent() -> None:
    assert [correlation(e, 4) for e in (1.0, 4.0)] == [1.0, 0.0]
    assert [effective_of(c, 64) for c in (1.0, 0.0)] == [1.0, 64.0]
    with pytest.raises(RuleError, match="at least 2, got 1"):
        correlation(1.0, 1)


def run_of(c: float | np.ndarray, alpha: float = 0.5) -> ObservedRun:
    alike = np.broadcast_to(c, MADE.shape)
    return ObservedRun(4, MADE, np.cumsum(32 / (1 + 3 * alike)), alike, 1.0, alpha)


def test_the_loss_of_other_numbers_by_hand() -> None:
    """All alike: 16 workers progress by a sixteenth of the samples where 4 did by a fourth, so 4^0.5 times the loss."""
    alike = forecast_quality(run_of(1.0), 16, AVERAGING)
    assert (alike.effective, alike.loss) == (pytest.approx(1.0), pytest.approx(2.0))
    single = forecast_quality(run_of(1.0), 1, AVERAGING)
    assert (single.effective, single.loss) == (pytest.approx(1.0), pytest.approx(0.5))
    independent = forecast_quality(run_of(0.0), 64, AVERAGING)
    assert (independent.effective, independent.loss) == (pytest.approx(64.0), pytest.approx(1.0))


def test_alpha_is_the_slope_of_the_middle() -> None:
    made = np.arange(1.0, 1001)
    losses = 3 * (made / 2) ** -0.3
    losses[made >= 500] = 0.01  # the rate has fallen
    losses[:60] = 50.0
    assert fitted_alpha(made, made / 2, losses) == pytest.approx(0.3, abs=0.003)
    assert fitted_alpha(made, made / 2, 1 / losses) == 0.0
    with pytest.raises(RuleError, match="the losses in 0 of 8 parts"):
        fitted_alpha(made, made, -losses)


LOSSES = [2 * n**-0.5 for n in range(1, BLOCKS + 1)]


def test_a_log_tells_all_of_it() -> None:
    log = run_log([None, None, *[2.5] * (BLOCKS - 2)], LOSSES)
    run = observed(log, AVERAGING)
    assert run.workers == 4 and run.minibatches.tolist() == MADE.tolist()
    assert run.correlation == pytest.approx([0.2] * BLOCKS)
    assert run.progress == pytest.approx(MADE * 2.5 / 4)
    assert run.loss == log.last("loss") and run.alpha == pytest.approx(0.5, abs=0.01)
    assert step_s(log) == pytest.approx(0.1)


def test_a_log_of_changing_workers() -> None:
    """Half of the blocks with 4 workers of which 2.5 count, then 16 of which 4 do: c is 0.2 in both."""
    log = run_log([2.5] * 16 + [4.0] * 16, LOSSES)
    for worker in log.workers:
        worker.generations = [GenerationEvent(0, 1, 4), GenerationEvent(17, 2, 16)]
        worker.exchanges = [replace(one, generation=1 if one.block <= 16 else 2) for one in worker.exchanges]
    run = observed(log, AVERAGING)
    assert run.workers == 16 and run.correlation == pytest.approx([0.2] * BLOCKS)
    assert run.minibatches[[15, 31]].tolist() == [16 * 32, 16 * 32 + 16 * 128]
    assert run.progress[-1] == pytest.approx(16 * 8 * (2.5 + 4))


def test_logs_that_do_not_tell_enough() -> None:
    with pytest.raises(RuleError, match="does not tell how many workers all are worth"):
        observed(run_log([None] * BLOCKS, LOSSES), AVERAGING)
    with pytest.raises(RuleError, match="reports no loss"):
        observed(run_log([2.0] * BLOCKS, []), AVERAGING)
    with pytest.raises(RuleError, match="above 0, got -1"):
        observed(run_log([2.0] * BLOCKS, [-1.0] * BLOCKS), AVERAGING)
    log = run_log([2.0] * BLOCKS, LOSSES)
    for worker in log.workers:
        worker.exchanges = worker.exchanges[1:]
    with pytest.raises(RuleError, match="continues another one"):
        observed(log, AVERAGING)


def test_a_loss_beyond_what_the_curve_tells_is_no_number() -> None:
    steep = [100.0 / n**2 for n in range(1, BLOCKS + 1)]
    said = quality_forecast(run_log([1.2] * BLOCKS, steep)).sentence
    assert "over" in said and said.endswith(" or more.")
    assert max(float(one) for one in re.findall(r"(\d[\d.]*) with", said)) <= 2.1 * steep[-1]

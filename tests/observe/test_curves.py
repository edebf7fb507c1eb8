# SPDX-License-Identifier: Apache-2.0
"""Curves: x counts all workers, y is what was reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.observe import read_run
from paceline_plugins.report.curves import Curve, by_samples, data_by_time, delays_of_pushes, thin

from .conftest import pushing, waiting

Write = Callable[..., Path]


def test_samples_are_summed_over_the_workers(write_run: Write) -> None:
    curve = by_samples(read_run(write_run(size=4)), "validation loss")
    assert curve.unit == "samples"
    assert curve.x == pytest.approx([4 * 32 * 4 * block for block in (10, 20, 30, 40)])
    assert not curve.noisy


def test_workers_that_do_not_go_in_step_keep_their_own_points(write_run: Write) -> None:
    def later(rank: int, events: list[dict[str, float]]) -> list[dict[str, float]]:
        """Worker 1 has done half as much at each moment, worker 2 a third."""
        for event in events:
            for key in ("total_minibatches", "total_samples"):
                if key in event:
                    event[key] //= rank + 1
        return events

    curve = by_samples(read_run(write_run(size=3, change=later)), "validation loss")
    assert len(curve.x) == 3 * 4
    done = [320 * 4, 320 * 4 // 2, 320 * 4 // 3]  # of each worker at the first report
    assert curve.x[0] == pytest.approx(sum(done), abs=3)


def test_delays_are_shares_of_all_pushes(write_run: Write) -> None:
    curve = delays_of_pushes(read_run(write_run(size=4, change=pushing)))
    assert curve.x.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert curve.y == pytest.approx(np.array([160, 120, 94, 120, 18, 0, 40]) / 5.52)
    none = delays_of_pushes(read_run(write_run("still")))
    assert len(none.x) == len(none.y) == 0


def test_thinning_keeps_the_mean() -> None:
    curve = Curve("c", "samples", np.arange(10_001.0), np.sin(np.arange(10_001.0)))
    few = thin(curve, most=100)
    assert len(few.x) == 100
    assert few.x.mean() == pytest.approx(curve.x.mean(), rel=0.01)
    assert thin(few, most=100) is few


def test_the_wait_for_data_is_spread_over_the_time_of_its_line(write_run: Write) -> None:
    run = read_run(write_run(change=waiting))
    curve = data_by_time(run.workers[1:], "worker 1", 40.0)
    assert curve.x == pytest.approx(np.arange(40) + 0.5)
    assert curve.y == pytest.approx([40.0] * 20 + [20.0] * 20)
    assert data_by_time(run.workers, "run", 40.0).y == pytest.approx([30.0] * 20 + [20.0] * 20)
    late = data_by_time(run.workers[1:], "worker 1", 80.0)  # of which the second half has no lines
    assert late.x == pytest.approx(np.arange(20) * 2 + 1.0)
    assert late.y == pytest.approx([40.0] * 10 + [20.0] * 10)

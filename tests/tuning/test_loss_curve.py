# SPDX-License-Identifier: Apache-2.0
"""The forecast of a held-out loss: Student's quantiles, lines by hand, and how often noise is taken for a change."""

from __future__ import annotations

import math
import random

import pytest

from paceline.tuning.held_out import HeldOutLog, is_held_out, together
from paceline.tuning.loss_curve import Excess, LossCurve, Point, steady, student


@pytest.mark.parametrize(
    ("confidence", "freedom", "value"),
    [(0.95, 10, 1.812), (0.975, 10, 2.228), (0.95, 30, 1.697), (0.975, 1000, 1.962), (0.5, 7, 0.0)],
)
def test_students_quantiles_are_those_of_the_tables(confidence: float, freedom: int, value: float) -> None:
    assert student(confidence, freedom) == pytest.approx(value, abs=0.002)


def power(first: int, last: int, step: int, slope: float = -0.3, lift: float = 0.0) -> list[Point]:
    """Points of L = 5 M^slope, lifted by a share."""
    return [(float(made), math.log(5.0) + slope * math.log(made) + lift) for made in range(first, last, step)]


def test_a_power_law_is_forecast_exactly() -> None:
    curve = LossCurve.through(power(1000, 2000, 50))
    assert curve is not None
    assert (curve.slope, curve.noise) == (pytest.approx(-0.3), pytest.approx(0.0, abs=1e-9))
    assert curve.forecast(8000) == pytest.approx(math.log(5.0) - 0.3 * math.log(8000))
    found = curve.excess(power(2000, 3000, 50, lift=0.02), 0.95)
    assert (found.mean, found.most, found.least) == pytest.approx((0.02, 0.02, 0.02))


def test_the_margin_by_hand() -> None:
    """Four points at ln M = 0, 1, 2, 3 with residuals +-0.1: s^2 = 0.04 / 2, S = 5, and one point at ln M = 4."""
    points = [(1.0, 0.1), (math.e, -0.1), (math.e**2, -0.1), (math.e**3, 0.1)]
    curve = LossCurve.through(points)
    assert curve is not None and (curve.slope, curve.together) == (pytest.approx(0.0), pytest.approx(1.0))
    s = math.sqrt(0.02) * math.sqrt(1 / 4 + 1 + 2.5**2 / 5)
    assert curve.margin([math.e**4], 0.95) == pytest.approx(student(0.95, 2) * s)


def test_points_that_say_the_same_count_less() -> None:
    runs = [(1.0 + k, 0.1 if k % 8 < 4 else -0.1) for k in range(32)]
    apart = [(1.0 + k, 0.1 if k % 2 else -0.1) for k in range(32)]
    curves = [LossCurve.through(points) for points in (runs, apart)]
    assert curves[0] is not None and curves[1] is not None
    assert curves[0].together > 2 and curves[1].together == 1.0


def test_there_is_no_line_through_less() -> None:
    assert LossCurve.through(power(1000, 1100, 50)) is None
    assert LossCurve.through([(5.0, 0.1)] * 9) is None
    assert steady(power(1000, 1500, 50), 0.95) is None  # ten points are too few


def test_a_curve_that_does_not_forecast_itself_is_not_steady() -> None:
    assert steady(power(1000, 2000, 25), 0.95) is not None
    bend = power(1000, 1500, 25) + power(1500, 2000, 25, lift=-0.05)
    assert steady(bend, 0.95) is None


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_noise_is_taken_for_a_change_as_often_as_its_confidence(correlation: float) -> None:
    """A change that costs nothing is found to cost more than its margin in at most 5 % of 800 curves, or near it."""
    generator, wrong = random.Random(3), 0
    for _ in range(800):
        noise, points = 0.0, []
        for made, loss in power(1000, 2600, 20):
            noise = correlation * noise + generator.gauss(0.0, 0.01)
            points.append((made, loss + noise))
        curve = LossCurve.through(points[:50])
        assert curve is not None
        wrong += curve.excess(points[50:], 0.95).least > 0
    assert 0.005 * 800 < wrong < (0.07 if correlation == 0 else 0.1) * 800


def test_branches_from_one_state() -> None:
    """Differences of 0.01, 0.02 and 0.03: their mean, and Student's with two degrees of freedom."""
    found = Excess.paired([1.0, 0.9, 0.8], [1.01, 0.92, 0.83], 0.95)
    assert found.mean == pytest.approx(0.02)
    assert found.margin == pytest.approx(student(0.95, 2) * 0.01 / math.sqrt(3))


# -- what is logged ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["held_out", "val_loss", "validation/loss", "eval_loss", "test-error", "dev_nll"])
def test_held_out_losses_by_name(name: str) -> None:
    assert is_held_out(name)


@pytest.mark.parametrize("name", ["loss", "train_loss", "val_accuracy", "test_ppl", "lr", "held_back", ""])
def test_other_values_by_name(name: str) -> None:
    assert not is_held_out(name)


def test_a_worker_tells_what_is_new_until_it_is_heard() -> None:
    log = HeldOutLog(4)
    for step in (1, 1, 2):
        log.stepped(step)
    log.logged({"val_loss": 2.0, "loss": 1.0}, 0.1)
    log.logged({"val_loss": math.nan}, 0.1)
    assert log.waits and log.said() == [8, {"val_loss": [[8, 2.0, 0.1], [8, None, 0.1]]}]
    assert log.said() == log.said()  # an exchange may be repeated
    log.heard()
    assert not log.waits and log.said() == [8, {}]


def test_workers_that_log_alike_are_averaged() -> None:
    """Rank 1 logs nothing, rank 2 its own part, rank 3 less often than the first; another name does not count."""
    said = [
        [40, {"test_loss": [[8, 9.0, 0.1]], "val_loss": [[20, 2.0, 0.1], [40, 1.0, 0.1]]}],
        [44, {}],
        [40, {"val_loss": [[20, 4.0, 0.1], [40, None, 0.1]]}],
        [40, {"val_loss": [[20, 90.0, 0.1]]}],
    ]
    assert together(said, "val_loss") == (44, "val_loss", [(20, 3.0, 0.1), (40, None, 0.1)])
    assert together(said, "")[1] == "test_loss"
    assert together([[4, {}]], "") == (4, "", [])

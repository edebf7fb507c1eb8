# SPDX-License-Identifier: Apache-2.0
"""How eta and zeta follow from what a user gives."""

from __future__ import annotations

from typing import Any

import pytest

import paceline
from paceline.rules import describe
from paceline.rules.outer import BlockMomentum, Nesterov
from paceline.rules.outer.gain import eta_zeta


@pytest.mark.parametrize(("workers", "eta"), [(4, 0.7347), (16, 0.8995), (64, 0.9619)])
def test_auto_follows_the_number_of_workers(workers: int, eta: float) -> None:
    outer = BlockMomentum()
    assert outer.lr_at(1000, workers) == 0.7
    assert outer.momentum_at(1000, workers) == pytest.approx(eta, abs=1e-4)
    assert 0.7 / (1 - outer.momentum_at(1000, workers)) == pytest.approx(workers**0.7)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_amplification_of_independent_displacements_is_part_of_the_gain(power: float) -> None:
    """16 of them are amplified by 4^p at most; with that, N^0.7 is the gain whatever p is."""
    outer = BlockMomentum(amplify=power)
    gain = outer.lr_at(1000, 16) / (1 - outer.momentum_at(1000, 16))
    assert gain * 4.0**power == pytest.approx(16**0.7)
    assert BlockMomentum(gain=7.0, amplify=power).momentum_at(1000, 16) == pytest.approx(0.9)


@pytest.mark.parametrize("outer", [BlockMomentum(), Nesterov()])
@pytest.mark.parametrize(("block", "gain"), [(1, 1.0), (4, 2.0), (9, 3.0), (49, 16**0.7), (10_000, 16**0.7)])
def test_the_default_gain_is_no_more_than_the_root_of_the_blocks(
    outer: BlockMomentum | Nesterov, block: int, gain: float
) -> None:
    assert outer.lr_at(block, 16) / (1 - outer.momentum_at(block, 16)) == pytest.approx(gain)


@pytest.mark.parametrize(
    "outer", [BlockMomentum(gain=7.0), BlockMomentum(gain="paper"), BlockMomentum(momentum=0.9), Nesterov(gain=7.0)]
)
def test_a_gain_or_momentum_that_was_asked_for_is_there_from_the_first_block(outer: BlockMomentum | Nesterov) -> None:
    assert outer.momentum_at(1, 16) == outer.momentum_at(10_000, 16)


def test_a_growing_gain_never_falls_below_the_block_learning_rate() -> None:
    assert [BlockMomentum(lr=2.0).momentum_at(block, 16) for block in (1, 4)] == [0.0, 0.0]
    assert BlockMomentum(lr=2.0).momentum_at(16, 16) == pytest.approx(0.5)
    assert BlockMomentum(ramp=4).momentum_at(3, 16) == pytest.approx((1 - 0.7 / 3**0.5) * 0.5)


def test_paper() -> None:
    assert BlockMomentum(gain="paper").momentum_at(1, 16) == 1 - 1 / 16
    assert BlockMomentum(gain="paper").lr_at(1, 16) == 1.0
    assert (Nesterov(gain="paper").momentum_at(1, 16), Nesterov(gain="paper").lr_at(1, 16)) == (0.9, 0.7)


PAPER = (0.75, 1.0)


@pytest.mark.parametrize(
    ("momentum", "lr", "gain", "want"),
    [
        (0.5, 0.3, "auto", (0.5, 0.3)),
        (0.5, 0.3, "paper", (0.5, 0.3)),
        (0.5, None, "auto", (0.5, 1.0)),
        (0.5, None, "paper", (0.5, 1.0)),
        (0.5, None, 4.0, (0.5, 2.0)),
        (None, 0.5, 2.0, (0.75, 0.5)),
        (None, 0.5, "paper", (0.75, 0.5)),
        (None, None, "paper", (0.75, 1.0)),
        (None, None, 2.8, (0.75, 0.7)),
        (None, None, 0.5, (0.0, 0.5)),
        (None, 1.0, "auto", (1 - 1 / 4**0.7, 1.0)),
    ],
)
def test_two_numbers_give_the_third(
    momentum: float | None, lr: float | None, gain: Any, want: tuple[float, float]
) -> None:
    assert eta_zeta(4, momentum, lr, gain, PAPER) == pytest.approx(want)


@pytest.mark.parametrize("recipe", ["bmuf", "bmuf_adam", "diloco"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"gain": 0}, "gain must be .* above 0, got 0"),
        ({"gain": -1.0}, "got -1.0"),
        ({"gain": "hot"}, "got 'hot'"),
        ({"gain": True}, "got True"),
        ({"gain": float("nan")}, "got nan"),
        ({"momentum": 1.0}, "momentum must be .* below 1, got 1.0"),
        ({"momentum": -0.1}, "got -0.1"),
        ({"momentum": "0.9"}, "got '0.9'"),
        ({"lr": 0}, "lr must be a number above 0, got 0"),
        ({"ramp": -1}, "ramp must be .* got -1"),
        ({"ramp": 1.5}, "got 1.5"),
        ({"lr": 3.0, "gain": 2.0}, "lr=3 is larger than the gain of 2"),
    ],
)
def test_senseless_numbers_are_refused(recipe: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(paceline.RuleError, match=said):
        paceline.RECIPES[recipe].build(**arguments)


def test_momentum_and_lr_and_gain_that_contradict_each_other_are_not_silently_dropped() -> None:
    """Three numbers over-determine; whichever way it is solved, the gain that `numbers` reports must be true."""
    try:
        rule = paceline.RECIPES["bmuf"].build(momentum=0.5, lr=1.0, gain=8.0)
    except paceline.RuleError:
        return
    numbers = describe.numbers(rule, 4)
    assert numbers["gain"] == float(numbers["lr"]) / (1 - float(numbers["momentum"]))

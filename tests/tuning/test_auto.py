# SPDX-License-Identifier: Apache-2.0
"""The recipe `auto` among virtual workers: which rule it is, which period it comes to, and that nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.forecast.sim import Clock
from paceline.rules import choice
from paceline.rules.payload import Delta
from tests.helpers import Outcome, Place, Program, adam, attached, momentum_sgd, same_bits, sgd

Make = Callable[[Any], torch.optim.Optimizer]
STEPS = 60
"""Of each of two workers: one epoch of 480 samples in batches of 4."""
CHANGED = 36
"""Steps with the first period of 4: eight blocks are measured, and the ninth exchange brings the period."""
LONG: dict[str, Any] = {"samples": 8 * STEPS, "epochs": 1}


@pytest.fixture(autouse=True)
def long_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block makes a pass."""
    monkeypatch.setattr(choice, "BLOCKS", 1)


def clock() -> Clock:
    """A minibatch takes 10 ms and a message 2 ms, so that two workers exchange for 4 ms: tau* = 19.6."""
    return Clock(compute=0.01, network=0.002)


def go(rule: str, workers: int = 2, time: Clock | None = None, **choices: Any) -> list[Outcome]:
    torch.manual_seed(5)
    program = Program(rule, **{**LONG, **choices})
    return [out for out in paceline.simulate(program, workers, clock=time or clock()) if out is not None]


RATE = "rate_exponent=0.29, even=False"
"""What `auto` does in blocks."""


def periods(place: Place) -> None:
    place.extra.setdefault("periods", []).append(place.run.rule.schedule.period)


# -- which rule it is --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("other", "optimizer"),
    [("bmuf", sgd), ("bmuf", momentum_sgd), ("bmuf_adam", adam)],
    ids=["sgd", "momentum", "adam"],
)
def test_with_one_period_it_is_the_rule_that_suits_the_optimizer(other: str, optimizer: Make) -> None:
    choices: dict[str, Any] = {"optimizer": optimizer, "samples": 160, "epochs": 1}
    outs, want = go("auto(probe=0, longest=4)", 3, **choices), go(f"{other}(period=4, {RATE})", 3, **choices)
    for out, plain in zip(outs, want, strict=True):
        assert same_bits(out.model, plain.model) and out.losses == plain.losses


def test_what_becomes_of_each_optimizer() -> None:
    adam, amsgrad = torch.optim.Adam, partial(torch.optim.AdamW, amsgrad=True)
    makes = {adam: "compensate", torch.optim.AdamW: "compensate", amsgrad: "keep", torch.optim.SGD: "keep"}
    for make, kind in makes.items():
        assert Delta("fitting").resolve(make(nn.Linear(2, 2).parameters())) == kind


# -- which period it comes to ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rule", "period"),
    [
        ("auto(probe=0)", 16),
        ("auto(probe=0, share=0.1)", 4),
        ("auto(probe=0, longest=15)", 15),
        ("auto(probe=0, first=5)", 20),
    ],
)
def test_the_period_that_the_clock_asks_for(rule: str, period: int) -> None:
    """tau* is 19.6, and 3.6 for a share of 0.1; the nearest of 4, 16, 64 is taken, or of 5, 20."""
    outs = go(rule, after_step=periods)
    for out in outs:
        first = 5 if "first" in rule else 4
        assert out.extra["periods"] == [first] * (9 * first - 1) + [period] * (STEPS - 9 * first + 1)
        assert same_bits(out.model, outs[0].model) and same_bits(out.model, out.exported)


@pytest.mark.parametrize(
    "rule",
    ["auto(probe=0, fragments=2, overlap=2)", "auto(probe=0, warmup=5, codec='int8')", "auto(probe=0, overlap=4)"],
)
def test_whatever_the_blocks_are_like(rule: str) -> None:
    """Two minibatches hide 20 ms, and nothing is left of 4."""
    outs = go(rule, optimizer=adam, samples=8 * 80, after_step=periods)
    assert outs[0].extra["periods"] == outs[1].extra["periods"]
    assert outs[0].extra["periods"][-1] == (4 if "overlap" in rule else 16)
    assert same_bits(outs[0].model, outs[1].model)


@pytest.mark.parametrize(("until", "periods_after"), [(200, [4, 8]), (105, [4])])
def test_a_network_that_changes_for_more_than_a_minute(until: int, periods_after: list[int]) -> None:
    """A minibatch takes a second and an exchange 0.8 s, but 4 s for blocks 50 to half of `until`."""

    class Slower(Clock):
        def message_s(self, source: int, to: int, nbytes: int, number: int) -> float:
            return 2.0 if 100 <= number < until else 0.4

    outs = go("auto", 2, Slower(1.0, 0.4), samples=8 * 360, after_step=periods)
    assert list(dict.fromkeys(outs[0].extra["periods"])) == periods_after
    assert outs[0].extra["periods"] == outs[1].extra["periods"] and same_bits(outs[0].model, outs[1].model)


def test_workers_that_run_out_of_data_come_to_it_as_well() -> None:
    def program() -> tuple[int, float]:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.0)
        with attached(model, "auto(probe=0)", lr=1.0) as (run, _, optimizer):
            for _ in range([70, 13, 34][run.world.rank]):
                model.weight.grad = torch.full_like(model.weight, -1.0)
                optimizer.step()
        return run.rule.schedule.period, float(model.weight.detach())

    outs = paceline.simulate(program, 3, clock=clock())
    assert len(set(outs)) == 1
    assert outs[0] is not None and outs[0][0] == 64  # three workers: four messages, 8 ms, tau* = 39.2


# -- by hand -----------------------------------------------------------------------------------------------------------
def test_a_period_that_somebody_sets_stays() -> None:
    def hook(place: Place) -> None:
        if (place.rank, place.step) == (1, 9):
            place.run.tune(period=6)
        if (place.rank, place.step) == (0, 50):
            place.run.tune(gain=2.0)
        periods(place)

    outs = go("auto(probe=0)", after_step=hook)
    assert [out.extra["periods"] for out in outs] == [[4] * 11 + [6] * (STEPS - 11)] * 2


# -- what is said and kept ---------------------------------------------------------------------------------------------
def test_on_another_number_of_workers_it_goes_on_with_the_period(tmp_path: Path) -> None:
    """Three workers of four messages would choose 64."""
    go("auto(probe=0)", save_at=44, stop_at=44, save_to=tmp_path / "c")
    outs = go("auto(probe=0)", 3, samples=8 * 120, epochs=2, resume=tmp_path / "c", after_step=periods)
    assert outs[0].extra["periods"] == outs[1].extra["periods"] == outs[2].extra["periods"]
    assert list(dict.fromkeys(outs[0].extra["periods"])) == [16]

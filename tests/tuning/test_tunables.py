# SPDX-License-Identifier: Apache-2.0
"""Settings of groups and rules: what a request means, with and without schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from paceline import rule_from_text
from paceline.core.world import World
from paceline.tuning.names import flat
from paceline.tuning.request_files import RequestFiles
from paceline.tuning.tunables import Tunables
from paceline.tuning.tuner import MeasuredChoices, Tuner

Schedule = Callable[[torch.optim.Optimizer], LRScheduler]


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


def tunables(*optimizers: torch.optim.Optimizer, rule: str = "bmuf(period=8)", workers: int = 4) -> Tunables:
    return Tunables(list(optimizers), rule_from_text(rule), workers)


def change(tunables: Tunables, **settings: Any) -> Any:
    changes = flat(settings)
    tunables.check(changes)
    snapshot = tunables.snapshot(changes)
    tunables.apply(changes)
    return snapshot


def moved(optimizer: torch.optim.Optimizer) -> float:
    """The rate with which plain SGD makes its next step."""
    [p] = optimizer.param_groups[0]["params"]
    before = float(p.detach())
    p.grad = -torch.ones(1)
    optimizer.step()
    return float(p.detach()) - before


def halving(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """From the rate as it is."""
    return StepLR(optimizer, 1, 0.5)


def absolute(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """From the rate at the beginning."""
    return LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.parametrize("schedule", [halving, absolute])
@pytest.mark.parametrize(("settings", "factor"), [({"lr_factor": 4.0}, 4.0), ({"lr": 0.5}, 2.0)])
def test_a_schedule_goes_on_in_proportion(schedule: Schedule, settings: dict[str, float], factor: float) -> None:
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    scheduler, tuned = schedule(optimizer), tunables(optimizer)
    rates = []
    for step in range(6):
        if step == 2:  # the schedule says 0.25
            snapshot = change(tuned, **settings)
        if step == 4:
            tuned.restore(snapshot)
        rates.append(moved(optimizer))
        assert optimizer.param_groups[0]["lr"] == 0.5**step  # what the program sees is its schedule's
        scheduler.step()
    assert rates == pytest.approx([1, 0.5, 0.25 * factor, 0.125 * factor, 1 / 16, 1 / 32])


def test_a_program_that_writes_the_rate_at_each_step_keeps_the_factor() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    tuned = tunables(optimizer)
    change(tuned, lr_factor=0.5)
    for rate in (1.0, 0.25):
        optimizer.param_groups[0]["lr"] = rate
        assert moved(optimizer) == rate / 2
    change(tuned, lr=3.0)  # and a rate in numbers is the rate
    assert moved(optimizer) == 3.0 and optimizer.param_groups[0]["lr"] == 3.0


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)])
def test_an_optimizer_that_writes_its_rate_inside_the_step_keeps_what_it_wrote(rate: Any) -> None:
    """Ports of Adafactor, D-adaptation and others hold a schedule of their own; no factor adds up in it."""

    class Falling(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            group = self.param_groups[0]
            for p in group["params"]:
                p -= group["lr"] * p.grad
            group["lr"] = group["lr"] * 0.5

    optimizer = Falling([parameter()], {"lr": rate})
    tuned = tunables(optimizer)
    tuned.rates.common = 4.0
    assert [moved(optimizer) for _ in range(3)] == [4.0, 2.0, 1.0]
    assert float(optimizer.param_groups[0]["lr"]) == 0.125


def test_a_rate_that_is_a_tensor_keeps_its_address() -> None:
    rate = torch.tensor(1.0)
    optimizer = torch.optim.Adam([parameter()], lr=rate, foreach=False)
    tuned = tunables(optimizer)
    change(tuned, lr_factor=0.5)
    with tuned.rates.applied():
        assert optimizer.param_groups[0]["lr"] is rate and rate == 0.5
    assert rate == 1.0
    change(tuned, lr=0.25)
    assert optimizer.param_groups[0]["lr"] is rate and rate == 0.25


def test_groups_are_counted_through_all_optimizers() -> None:
    first = torch.optim.SGD([{"params": [parameter()]}, {"params": [parameter()], "lr": 0.2}], lr=0.1, momentum=0.9)
    second = torch.optim.Adam([parameter()], lr=0.3)
    tuned = tunables(first, second)
    before = change(tuned, lr={1: 0.5, 2: 0.6}, weight_decay=0.01, betas=(0.5, 0.9), **{"momentum@0": 0.8})
    assert [group["lr"] for _, group in tuned.rates.groups()] == [0.1, 0.5, 0.6]
    assert [group["weight_decay"] for _, group in tuned.rates.groups()] == [0.01] * 3
    assert second.param_groups[0]["betas"] == (0.5, 0.9)
    assert [group["momentum"] for group in first.param_groups] == [0.8, 0.9]
    assert tuned.show(["lr", "momentum", "betas"]) == {
        "lr": [0.1, 0.5, 0.6], "momentum": [0.8, 0.9], "betas": [0.5, 0.9],
    }  # fmt: skip
    tuned.restore(before)
    assert [group["lr"] for _, group in tuned.rates.groups()] == [0.1, 0.2, 0.3]
    assert [group["momentum"] for group in first.param_groups] == [0.9, 0.9]
    assert second.param_groups[0]["betas"] == (0.9, 0.999)
    change(tuned, lr=0.7, **{"lr@0": 0.8})
    assert [group["lr"] for _, group in tuned.rates.groups()] == [0.8, 0.7, 0.7]


@pytest.mark.parametrize(
    ("rule", "settings", "momentum", "rate"),
    [
        ("bmuf(gain=2.0, lr=0.5)", {"outer_momentum": 0.5}, 0.5, 0.5),
        ("bmuf(gain=2.0, lr=0.5)", {"outer_lr": 0.25}, 0.75, 0.25),
        ("bmuf(gain=2.0, lr=0.5)", {"gain": 7.0}, 0.9, 0.7),
        ("diloco(momentum=0.9, lr=0.7)", {"gain": 2.0, "outer_lr": 1.0}, 0.5, 1.0),
        ("diloco(momentum=0.9, lr=0.7)", {"gain": 2.0, "outer_momentum": 0.75}, 0.75, 0.5),
        ("diloco(momentum=0.9, lr=0.7)", {"outer_lr": 0.3, "outer_momentum": 0.2}, 0.2, 0.3),
        ("bmuf(momentum=0.2, lr=0.3)", {"gain": "paper"}, 0.75, 1.0),
    ],
)
def test_numbers_of_the_outer_step(rule: str, settings: dict[str, Any], momentum: float, rate: float) -> None:
    tuned = tunables(torch.optim.SGD([parameter()], lr=0.1), rule=rule)
    before, text = tuned.rule, tuned.rule.text()
    snapshot = change(tuned, **settings)
    assert tuned.show(["outer_momentum", "outer_lr"]) == pytest.approx({"outer_momentum": momentum, "outer_lr": rate})
    assert tuned.rule.text() == text
    tuned.restore(snapshot)
    assert tuned.rule == before


def test_state_is_put_back() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    tuned = tunables(optimizer)
    change(tuned, lr_factor=0.5, period=3, gain=2.0)
    other = tunables(optimizer)
    other.load(tuned.state())
    assert other.rule == tuned.rule and other.rates.factors == {0: 0.5}


def test_a_number_that_stays_is_that_of_the_present_workers() -> None:
    """Workers come and go; here the run began with one."""
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    tuned = tunables(optimizer, workers=1)
    tuner = Tuner(MeasuredChoices(tuned), World(), RequestFiles(None, each=False), lambda *_, **__: None)
    tuner.among(World(rank=1, size=4))
    change(tuned, outer_lr=0.5)
    assert tuned.rule.outer.momentum == tunables(optimizer, workers=4).show(["outer_momentum"])["outer_momentum"]


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
def test_a_rate_that_follows_the_workers_comes_on_top_and_is_no_setting(rate: Any) -> None:
    """Requests, snapshots and the program's schedule are about the rate of one worker."""
    optimizer = torch.optim.SGD([parameter()], lr=rate)
    scheduler, tuned = StepLR(optimizer, 1, 0.5), tunables(optimizer)
    tuned.rates.common = 2.0
    assert moved(optimizer) == 1.0 and float(optimizer.param_groups[0]["lr"]) == 0.5
    scheduler.step()
    change(tuned, lr_factor=3.0)
    assert moved(optimizer) == 1.5 and tuned.show(["lr"]) == {"lr": 0.75}
    assert tuned.numbers()["lr"] == 1.5  # what a tracker draws is the rate of the steps
    assert tuned.state()["factors"] == [[0, 3.0]]
    tuned.rates.common = 1.0
    assert moved(optimizer) == 0.75

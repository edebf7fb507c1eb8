# SPDX-License-Identifier: Apache-2.0
"""What is tuned changes on all workers at the same place, whoever asks and whatever the recipe."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.errors import PacelineError
from paceline.tuning import TuneRequest
from tests.helpers import (
    Outcome,
    Place,
    adam,
    attached,
    make_data,
    make_net,
    momentum_sgd,
    same_bits,
    sgd,
    state_of,
    train,
)
from tests.tables import rest_is_full

Make = Callable[[Any], torch.optim.Optimizer]
N = 3
STEPS = 16
"""Of each worker: 2 epochs of 96 samples in batches of 4."""
RECIPES: list[tuple[str, Make]] = [
    ("sync", momentum_sgd),
    ("one_bit(warmup=3)", momentum_sgd),
    ("averaging(period=3)", adam),
    ("bmuf(period=3, warmup=6)", momentum_sgd),
    ("bmuf_adam(period=4, overlap=3, fragments=2)", adam),
    ("streaming_diloco(period=3, overlap=3, fragments=3, mixing=None, warmup=2)", adam),
]
recipes = pytest.mark.parametrize(("rule", "optimizer"), RECIPES, ids=[rule for rule, _ in RECIPES])
blocks = pytest.mark.parametrize(("rule", "optimizer"), RECIPES[2:], ids=[rule for rule, _ in RECIPES[2:]])
few = pytest.mark.parametrize(("rule", "optimizer"), [RECIPES[0], RECIPES[3], RECIPES[4]], ids=["sync", "bmuf", "adam"])


class Asking:
    """A hook that asks at given places, and writes down what the optimizer's settings are after each step.

    Args:
        asks: (rank, step, arguments of `run.tune`).
    """

    def __init__(self, *asks: tuple[int, int, dict[str, Any]]) -> None:
        self.asks = asks

    def __call__(self, place: Place) -> None:
        for rank, step, settings in self.asks:
            if (place.rank, place.step) == (rank, step):
                place.extra.setdefault("requests", []).append(place.run.tune(**settings))
        place.extra.setdefault("lr", []).append(place.optimizer.param_groups[0]["lr"])
        place.extra.setdefault("rule", []).append(place.run.rule)
        place.extra["tuner"] = place.run._context.tuner


def go(rule: str, optimizer: Make, hook: Any, **choices: Any) -> list[Outcome]:
    return train(rule, N, **{"optimizer": optimizer, "samples": 96, "after_step": hook, **choices})


def requests(outs: list[Outcome]) -> list[TuneRequest]:
    return [one for out in outs for one in out.extra.get("requests", [])]


def script(at: int, change: Callable[[torch.optim.Optimizer], None]) -> Callable[[Place], None]:
    """A program that changes something by itself after step `at`."""

    def hook(place: Place) -> None:
        if place.step == at:
            change(place.optimizer)

    return hook


def set_lr(value: float) -> Callable[[torch.optim.Optimizer], None]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = value

    return change


@recipes
def test_a_rate_changes_on_all_workers_after_the_same_step(rule: str, optimizer: Make) -> None:
    place = random.Random(rule)
    outs = go(rule, optimizer, Asking((place.randrange(N), place.randrange(1, 8), {"lr": 0.003})))
    [request] = requests(outs)
    assert request.applied and not request.refused
    rates = outs[0].extra["lr"]
    assert all(out.extra["lr"] == rates for out in outs) and len(rates) == STEPS
    at = rates.index(0.003)
    assert request.minibatch == at + 1 and 0 < at < STEPS - 1
    written = go(rule, optimizer, script(at, set_lr(0.003)))
    untouched = go(rule, optimizer, None)
    for out, other, plain in zip(outs, written, untouched, strict=True):
        assert same_bits(out.model, other.model) and same_bits(out.exported, other.exported)
        assert not same_bits(out.model, plain.model)


@blocks
def test_a_period_changes_on_all_workers(rule: str, optimizer: Make, tmp_path: Path) -> None:
    outs = go(rule, optimizer, Asking((2, 1, {"period": 5})), settings={"log": tmp_path})
    [request] = requests(outs)
    assert request.applied and request.values == {"period": [int(rule.split("period=")[1][0]), 5]}
    periods = [[one.schedule.period for one in out.extra["rule"]] for out in outs]
    assert periods[1:] == periods[:-1] and periods[0][-1] == 5
    for out in outs[1:]:
        assert same_bits(out.model, outs[0].model)
    events = [json.loads(line) for line in (tmp_path / "rank-001.jsonl").read_text().splitlines()]
    [told] = [event for event in events if event["kind"] == "tune"]
    assert (told["by"], told["changes"], told["total_minibatches"]) == (2, request.values, request.minibatch)


@few
def test_the_last_change_is_undone(rule: str, optimizer: Make) -> None:
    changes = [(1, 0, {"lr": 0.5}), (1, 5, {"lr_factor": 0.5}), (2, 8, {"revert": True}), (0, 11, {"revert": True})]
    outs = go(rule, optimizer, Asking(*changes))
    before = optimizer([torch.zeros(1)]).param_groups[0]["lr"]
    for out in outs:
        tuner = out.extra["tuner"]
        assert tuner.tunables.show(["lr"]) == {"lr": before} and tuner.state()["stack"] == []
    seen = [one.values for one in sorted(requests(outs), key=lambda one: one.minibatch)]
    assert seen == [{"lr": [before, 0.5]}, {"lr": [0.5, 0.25]}, {"lr@0": [0.25, 0.5]}, {"lr@0": [0.5, before]}]


@pytest.mark.parametrize(
    ("rule", "settings", "wrong"),
    [
        ("sync", {"period": 3}, "no such setting"),
        ("averaging(period=3)", {"gain": 3.0}, "no such setting.*period"),
        ("bmuf(period=3)", {"outer_momentum": 1.5}, "below 1"),
        ("bmuf(period=3, gain=2.0)", {"gain": 0.1, "outer_lr": 0.7}, "larger than the gain"),
        ("streaming_diloco(period=4, overlap=2, fragments=3)", {"period": 2}, "fragments"),
        ("sync", {"learning_rate": 3}, "cannot be tuned"),
        ("sync", {"lr@4": 3.0}, "groups 0 to 0"),
        ("sync", {"betas": (0.9, 0.9)}, "SGD has no betas.*what can be tuned"),
        ("sync", {"lr": float("nan")}, "finite"),
        ("sync", {"momentum": 0.0}, "attach again"),
        ("sync", {"lr": 0.1, "lr_factor": 0.5}, "choose one"),
        ("sync", {}, "nothing to tune"),
        ("sync", {"revert": True}, "no change to undo"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_asked(rule: str, settings: dict[str, Any], wrong: str) -> None:
    def hook(place: Place) -> None:
        if (place.rank, place.step) == (1, 2):
            with pytest.raises(PacelineError, match=wrong):
                place.run.tune(**settings)

    outs, untouched = go(rule, momentum_sgd, hook), go(rule, momentum_sgd, None)
    assert same_bits(outs[1].model, untouched[1].model) and outs[0].bytes_sent == untouched[0].bytes_sent


@few
def test_what_one_worker_cannot_do_is_done_by_none(rule: str, optimizer: Make) -> None:
    def hook(place: Place) -> None:
        if place.step == 1 and place.rank == 2:  # a program that differs on one worker
            place.run._context.tuner.tunables.check = refuse  # type: ignore[method-assign]
        Asking((0, 4, {"lr": 0.5}))(place)

    def refuse(changes: Any) -> None:
        raise PacelineError("not here")

    outs = go(rule, optimizer, hook)
    [request] = requests(outs)
    assert not request.applied and "not here (rank 2" in request.refused
    assert all(0.5 not in out.extra["lr"] for out in outs)


@recipes
@pytest.mark.parametrize("at", rest_is_full([5, 8], 1))
def test_a_resumed_run_goes_on_with_what_was_tuned(rule: str, optimizer: Make, at: int, tmp_path: Path) -> None:
    changes: list[Any] = [(1, 2, {"lr": 0.03}), (2, 3, {"lr_factor": 0.5}), (0, 6, {"weight_decay": 0.02})]
    if "period" in rule:
        changes.append((0, 3, {"period": 5}))
    hook = Asking(*changes, (1, 11, {"revert": True}))
    whole = go(rule, optimizer, hook)
    go(rule, optimizer, hook, save_at=at, save_to=tmp_path / "c", stop_at=at)
    rest = go(rule, optimizer, hook, resume=tmp_path / "c")
    for one, other in zip(whole, rest, strict=True):
        assert same_bits(one.model, other.model) and same_bits(one.exported, other.exported)
        assert one.extra["lr"][-1] == other.extra["lr"][-1]
        assert one.extra["tuner"].state() == other.extra["tuner"].state()


def test_another_number_of_workers_goes_on_with_what_was_tuned(tmp_path: Path) -> None:
    rule = "bmuf(period=3, fragments=2)"
    go(rule, sgd, Asking((1, 2, {"period": 4, "lr_factor": 0.5})), save_at=9, save_to=tmp_path / "c", stop_at=9)
    outs = train(rule, 2, optimizer=sgd, samples=96, resume=tmp_path / "c", after_step=Asking())
    for out in outs:
        assert out.extra["rule"][-1].schedule.period == 4
        assert out.extra["tuner"].tunables.show(["lr"]) == {"lr": 0.05}
    [alone] = train(rule, 1, optimizer=sgd, samples=96, resume=tmp_path / "c", after_step=Asking())
    assert alone.extra["tuner"].tunables.show(["lr"]) == {"lr": 0.05}


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "a", "b"]], ids=["one host", "two hosts"])
def test_processes_of_a_host_that_are_one_worker(hosts: list[str]) -> None:
    """Inside a host gradients are exchanged, and only between hosts blocks; a request of any process reaches all."""

    def program() -> tuple[dict[str, Tensor], list[float]]:
        model, rates = make_net(), []
        with attached(model, "bmuf(period=3, within='host')") as (run, _, optimizer):
            for step in range(12):
                x, y = make_data(4, seed=10 * step + run.world.rank).tensors
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                rates.append(optimizer.param_groups[0]["lr"])
                if (run.world.rank, step) == (1, 1):
                    run.tune(lr=0.025)
        return state_of(model), rates

    outs = list(paceline.simulate(program, len(hosts), hosts=hosts))
    for state, rates in outs:
        assert same_bits(state, outs[0][0])
        assert rates == [0.1] * 2 + [0.025] * 10  # with the third step, which ends the first block where there are any

# SPDX-License-Identifier: Apache-2.0
"""A shard at its owner: against torch's own optimizers, and against numbers worked out by hand."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.rules.outer import AdaDelay, Arrival, DelayCompensated, Elastic, Share, StalenessAware, Sum, TunedMomentum
from paceline.rules.schedule import Bounded
from paceline.rules.topology import Sharded
from paceline.update.server.shard import (
    REFUSED,
    AddDelta,
    BlendBuffer,
    ElasticPull,
    GroupSettings,
    IncomingPush,
    OptimizerSteps,
    ParameterShard,
    UpdateRule,
    WorkerClocks,
)
from tests.tables import dealt

OPTIMIZERS: dict[str, tuple[type[Optimizer], GroupSettings]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "dampening": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "dampening": 0.3}),
    "decay": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.02}),
    "uphill": (torch.optim.SGD, {"lr": 0.05, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5, "rho": 0.8}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True, "alpha": 0.9}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "momentum_decay": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.05, "betas": [0.5, 0.9]}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01, "etas": [0.4, 1.3]}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05, "lambd": 0.01}),
}
SIZE = 1000


def start(n: int = SIZE, seed: int = 1) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def clocks(workers: int = 1, staleness: int | None = None) -> WorkerClocks:
    return WorkerClocks(Bounded(staleness, overlap=0), range(workers))


def piece_of(
    anchor: Tensor, way: Callable[[Tensor], UpdateRule], *, workers: int = 1, keeps: bool = False, number: int = 0
) -> ParameterShard:
    return ParameterShard(number, anchor.clone(), way, clocks(workers), keeps)


def steps(outer: Arrival, kind: type[Optimizer] = torch.optim.SGD, **settings: Any) -> Callable[[Tensor], UpdateRule]:
    given = {"lr": 1.0} | settings
    return lambda anchor: OptimizerSteps(outer, kind, anchor, given)


def push(
    shard: ParameterShard, values: Tensor, sender: int = 0, version: int | None = None, clock: int = 0, **settings: Any
) -> int:
    at = shard.version if version is None else version
    return shard.push(values.clone(), IncomingPush(sender, clock, at, 1, settings))


def pull(shard: ParameterShard, reader: int = 0) -> tuple[Tensor, int]:
    out = torch.empty_like(shard.anchor)
    return out, shard.pull(reader, out)


def as_tuples(settings: GroupSettings) -> GroupSettings:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}


def serial(kind: type[Optimizer], settings: GroupSettings, gradients: list[Tensor], rates: list[float]) -> Tensor:
    parameter = nn.Parameter(start())
    optimizer = kind([parameter], **as_tuples(settings))
    for gradient, rate in zip(gradients, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


# -- one worker, no delay ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "largest", "workers"), dealt([(name,) for name in OPTIMIZERS], [(64, 1), (192, 3), (1024, 1)])
)
def test_pieces_have_the_bits_of_the_serial_optimizer(name: str, largest: int, workers: int) -> None:
    """However the span is cut, and with a learning rate that the sender's schedule changes."""
    kind, settings = OPTIMIZERS[name]
    gradients = [start(seed=10 + k) for k in range(9)]
    rates = [settings["lr"] * 0.9**k for k in range(9)]
    want = serial(kind, settings, gradients, rates)
    assert not torch.equal(want, serial(kind, settings, gradients, [settings["lr"]] * 9)) or name == "rprop"
    cuts = Sharded(largest).pieces(SIZE, workers)
    assert len(cuts) >= SIZE / largest
    found = torch.empty(SIZE)
    for cut in cuts:
        shard = piece_of(start()[cut.begin : cut.end], steps(Sum(), kind, **settings))
        for gradient, rate in zip(gradients, rates, strict=True):
            assert push(shard, gradient[cut.begin : cut.end], **{**settings, "lr": rate}) == 0
        found[cut.begin : cut.end] = pull(shard)[0]
        assert shard.version == 9
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    "outer",
    [Share(), StalenessAware(), AdaDelay(0.0), TunedMomentum(), DelayCompensated(), DelayCompensated("adaptive")],
    ids=repr,
)
def test_one_worker_without_delay_is_the_serial_optimizer_under_every_outer(outer: Arrival) -> None:
    kind, settings = OPTIMIZERS["decay"]
    gradients = [start(seed=10 + k) for k in range(5)]
    want = serial(kind, settings, gradients, [settings["lr"]] * 5)
    shard = piece_of(start(), steps(outer, kind, **settings), keeps=outer.needs_origin)
    for gradient in gradients:
        pull(shard)
        push(shard, gradient)
    assert torch.equal(shard.anchor, want)


def test_the_optimizers_step_leaves_rate_and_momentum_as_they_were() -> None:
    """A factor on the rate is of that push alone."""
    shard = piece_of(torch.zeros(1), steps(StalenessAware()))
    for _ in range(4):
        push(shard, torch.zeros(1))
    push(shard, torch.ones(1), version=0)  # delay 4
    assert shard.anchor.item() == -0.25
    push(shard, torch.ones(1))
    assert shard.anchor.item() == -1.25


# -- versions and delays -----------------------------------------------------------------------------------------------
def test_what_an_optimizer_of_the_user_puts_around_its_step_stays() -> None:
    def twice(step: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(step)
        def wrapper(self: Any) -> None:
            step(self)
            step(self)

        return wrapper

    class Twice(torch.optim.SGD):
        step = twice(torch.optim.SGD.step)  # type: ignore[assignment]

    anchor = torch.zeros(2)
    shard = ParameterShard(
        0, anchor, lambda a: OptimizerSteps(Sum(), Twice, a, {"lr": 1.0}), WorkerClocks(Bounded(), [0]), False
    )
    shard.push(torch.ones(2), IncomingPush(0, 1, 0, 1))
    assert anchor.tolist() == [-2.0, -2.0]


def test_versions_and_delays() -> None:
    shard = piece_of(torch.zeros(3), steps(Sum()), workers=2)
    assert pull(shard, 0)[1] == pull(shard, 1)[1] == 0
    assert [push(shard, torch.ones(3), 0, version=0) for _ in range(3)] == [0, 1, 2]
    assert pull(shard)[1] == 3
    assert push(shard, torch.ones(3), 1, version=0) == 3
    assert push(shard, torch.ones(3), 1, version=3) == 1
    assert pull(shard)[1] == 5


def test_a_successor_that_knows_less_goes_on_from_the_newest_version_that_is_known() -> None:
    shard = piece_of(torch.zeros(3), steps(Sum()))
    assert push(shard, torch.ones(3), version=40) == 0
    assert shard.version == 41


@pytest.mark.parametrize(
    "bad", [[1.0, float("nan"), 2.0], [float("inf"), float("-inf"), 0.0], [1.0, float("-inf"), 0.0]]
)
@pytest.mark.parametrize(
    "way",
    [
        steps(Sum(), momentum=0.9),
        lambda a: AddDelta(Sum()),
        lambda a: ElasticPull(Elastic(), 2),
        lambda a: BlendBuffer(),
    ],
)
def test_what_is_not_finite_is_refused_and_nothing_changes(
    bad: list[float], way: Callable[[Tensor], UpdateRule]
) -> None:
    shard = piece_of(start(3), way, workers=2)
    push(shard, start(3, 2))
    before = shard.state()
    assert push(shard, torch.tensor(bad), 1) == REFUSED
    after = shard.state()
    assert torch.equal(before["anchor"], after["anchor"]) and before["about"] == after["about"]
    assert all(torch.equal(before["tensors"][k], after["tensors"][k]) for k in before["tensors"])
    assert bool(torch.isfinite(shard.anchor).all())


def test_the_settings_of_a_push_are_those_of_its_sender_at_that_time() -> None:
    shard = piece_of(torch.zeros(1), steps(Sum(), lr=0.5), workers=2)
    push(shard, torch.ones(1), 0, lr=0.5)
    push(shard, torch.ones(1), 1, lr=0.125)
    push(shard, torch.ones(1), 0, lr=0.25)
    assert shard.anchor.item() == -(0.5 + 0.125 + 0.25)
    push(shard, torch.zeros(1), 1, lr=1.0, weight_decay=0.5)
    assert shard.anchor.item() == -0.4375
    push(shard, torch.ones(1), 0, lr=0.5, weight_decay=0.0)
    assert shard.anchor.item() == -0.9375


# -- delay compensation ------------------------------------------------------------------------------------------------
def compensated(**choices: Any) -> ParameterShard:
    """One number at 1.0; plain SGD with lr 1; lam0 = 0.5."""
    outer = DelayCompensated(**{"strength": 0.5} | choices)
    return piece_of(torch.ones(1), steps(outer), workers=2, keeps=True)


def test_the_backup_is_made_at_the_pull() -> None:
    """Worker 1 pulls 1.0, worker 0 moves it to 3.0; g + lam g g (3 - 1) with g = 0.25 is 0.3125."""
    shard = compensated()
    pull(shard, 0)
    pull(shard, 1)
    push(shard, torch.tensor([-2.0]), 0, version=0)
    assert shard.anchor.item() == 3.0
    push(shard, torch.tensor([0.25]), 1, version=0)
    assert shard.anchor.item() == 3.0 - (0.25 + 0.5 * 0.25 * 0.25 * 2.0)


@pytest.mark.parametrize("how", ["snapshot", "state"])
def test_a_restored_shard_knows_the_highest_rate(how: str) -> None:
    """Compensation starts at half of the rate of the first push, which only the first shard has seen."""
    first, second = compensated(start=0.5), compensated(start=0.5)
    pull(first, 1)
    push(first, torch.tensor([-2.0]), 0, lr=1.0)  # 3.0
    if how == "snapshot":
        about, row = first.snapshot()
        second.restore(wire(about), row.clone())
    else:
        second.load(first.state())
    assert second.anchor.item() == 3.0
    pull(second, 0)
    push(second, torch.tensor([-1.0]), 1, version=1, lr=0.75)  # 3.75, and nothing compensated
    push(second, torch.tensor([0.25]), 0, version=1, lr=0.5)
    assert second.anchor.item() == 3.75 - 0.5 * (0.25 + 0.5 * 0.25 * 0.25 * 0.75)


def test_another_workers_push_between_two_of_one_worker() -> None:
    """A backup made at worker 1's first push would be 2.0 and the correction of its second 1.0 short."""
    shard = compensated()
    pull(shard, 1)
    push(shard, torch.tensor([-1.0]), 1, version=0)  # 2.0; its answer is still on its way
    push(shard, torch.tensor([-2.0]), 0, version=0)  # the first of worker 0, at 1.0: -2 + 0.5 * 4 * (2 - 1) = 0
    assert shard.anchor.item() == 2.0
    push(shard, torch.tensor([-1.0]), 0, version=1)
    now = shard.anchor.item()
    push(shard, torch.tensor([0.25]), 1, version=0)
    assert shard.anchor.item() == now - (0.25 + 0.5 * 0.25**2 * (now - 1.0))


def test_with_an_answer_under_way_the_backup_is_the_one_of_the_version_that_was_pushed_at() -> None:
    """Overlap 1: the worker pulls version 1 and then pushes what it computed at version 0, again and again."""
    shard = compensated()
    values = {pull(shard, 1)[1]: 1.0}
    versions = [0, 0]
    for k in range(6):
        gradient, now, at = 0.125 * (k + 1), shard.anchor.item(), versions[-2]
        assert push(shard, torch.tensor([gradient]), 1, version=at) == min(k, 1)
        assert shard.anchor.item() == pytest.approx(now - gradient - 0.5 * gradient**2 * (now - values[at]), abs=1e-6)
        out, version = pull(shard, 1)
        values[version] = out.item()
        versions.append(version)
    assert len(shard.origins[1]) <= 3, "what nobody can push at any more is dropped"


# -- displacements, centers, buffers -----------------------------------------------------------------------------------
def test_the_center_is_pulled_by_a_share_that_stays_when_workers_leave() -> None:
    shard = piece_of(torch.zeros(1), lambda a: ElasticPull(Elastic(1.0), 4), workers=4)
    push(shard, torch.tensor([8.0]))
    assert shard.anchor.item() == 2.0
    shard.leave(1)
    push(shard, torch.tensor([10.0]))
    assert shard.anchor.item() == 4.0


def test_buffers_move_towards_each_worker_and_counters_take_the_largest() -> None:
    shard = piece_of(torch.zeros(1), lambda a: BlendBuffer(), workers=4)
    push(shard, torch.tensor([8.0]))
    push(shard, torch.tensor([4.0]), 1)
    assert shard.anchor.item() == 2.0 + 0.25 * 2.0
    counter = piece_of(torch.tensor([3]), lambda a: BlendBuffer(), workers=4)
    for seen in (5, 2, 7, 6):
        push(counter, torch.tensor([seen]))
    assert counter.anchor.tolist() == [7] and counter.anchor.dtype == torch.int64


# -- neighbours and checkpoints ----------------------------------------------------------------------------------------
def wire(about: dict[str, Any]) -> dict[str, Any]:
    """What is left of it behind a network."""
    found: dict[str, Any] = json.loads(json.dumps(about))
    return found


@pytest.mark.parametrize(("name", "how"), dealt([(name,) for name in OPTIMIZERS], [("snapshot",), ("state",)]))
def test_another_piece_goes_on_from_what_this_one_had(name: str, how: str) -> None:
    kind, settings = OPTIMIZERS[name]
    outer = DelayCompensated("adaptive")
    first, second = (piece_of(start(seed=k), steps(outer, kind, **settings), workers=2, keeps=True) for k in (1, 2))
    for k in range(4):
        pull(first, k % 2)
        push(first, start(seed=10 + k), k % 2)
    pull(first, 1)
    if how == "snapshot":
        about, row = first.snapshot()
        assert row.shape == (SIZE * (1 + len(about["tensors"])),)
        second.restore(wire(about), row.clone())
    else:
        second.load(first.state())
    assert second.version == first.version == 4
    for k in range(4, 8):
        for shard in (first, second):
            pull(shard, k % 2)
            push(shard, start(seed=10 + k), k % 2)
    assert torch.equal(first.anchor, second.anchor)


def test_backups_and_clocks_are_part_of_the_state() -> None:
    one, other = compensated(), compensated()
    pull(one, 1)
    push(one, torch.tensor([-2.0]), 0)
    pull(one, 1)
    push(one, torch.tensor([0.5]), 0, version=1)
    one.clocks.tick(0, 7)
    other.load(one.state())
    assert other.clocks.state() == [[0, 7], [1, 0]]
    for version in (0, 1):
        for shard in (one, other):
            push(shard, torch.tensor([0.25]), 1, version=version)
        assert torch.equal(one.anchor, other.anchor)

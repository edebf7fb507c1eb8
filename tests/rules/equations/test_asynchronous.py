# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rules against their equations, written down once more, up to the end of the last worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.rules.schedule import Bounded
from paceline.update.server.shard import WorkerClocks
from tests.helpers import follow, rank, simulate

F64 = torch.float64
LR = 0.25


def program(
    rule: str, steps: tuple[int, ...], gradient: Callable[[Tensor, int, int], Tensor], momentum: float = 0.0
) -> dict[str, Any]:
    """`steps[rank]` steps of SGD on `gradient(theta, rank, step)`; what each worker saw before it closed, and the end.
    A worker goes its way without data of ours, so that all make as many steps as they are told.
    """
    model = nn.Module()
    model.p = nn.Parameter(torch.ones(3, dtype=F64))
    optimizer = torch.optim.SGD([model.p], lr=LR, momentum=momentum)
    with paceline.attach(model, optimizer, rule, timeout_s=20):
        seen = []
        for step in range(steps[rank()]):
            follow(optimizer, (model.p * gradient(model.p.detach().clone(), rank(), step)).sum())
            seen.append(model.p.detach().clone())
    return {"seen": seen, "end": model.p.detach().clone()}


def constant(theta: Tensor, worker: int, step: int) -> Tensor:
    return torch.ones_like(theta)


# -- what a push weighs near the end -----------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [2, 3, 4, 5])
@pytest.mark.parametrize("rule", ["ssp(staleness=1)", "ssp(staleness=3)", "ssp(staleness=None)", "ssp(period=2)"])
def test_a_clock_moves_as_far_as_one_step_up_to_the_last(rule: str, workers: int) -> None:
    """Equal workers close one after another; K clocks of N pushes with 1/N of the rate."""
    for out in simulate(partial(program, rule, (6,) * workers, constant), workers):
        torch.testing.assert_close(out["end"], torch.full((3,), 1 - 6 * LR, dtype=F64))


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_tuned_momentum_takes_off_the_same_up_to_the_last(workers: int, overlap: int) -> None:
    m = 0.9
    tuned = m - (1 - 1 / workers)
    rate = LR * (1 - tuned) / (1 - m)
    theta, buffer = 1.0, 0.0
    for _ in range(6 * workers):
        buffer = tuned * buffer + 1.0
        theta -= rate * buffer
    rule = f"momentum_tuned(overlap={overlap})"
    for out in simulate(partial(program, rule, (6,) * workers, constant, momentum=m), workers):
        torch.testing.assert_close(out["end"], torch.full((3,), theta, dtype=F64))


def test_who_makes_a_clock() -> None:
    clocks = WorkerClocks(Bounded(), range(4))
    for worker, clock in ((0, 5), (1, 5), (2, 4), (3, 3)):
        clocks.tick(worker, clock)
    assert clocks.sharing(5) == 4
    clocks.leave(0)
    clocks.leave(3)
    assert [clocks.sharing(clock) for clock in (3, 4, 5, 6)] == [4, 3, 3, 2]
    clocks.idle(1)
    clocks.tick(2, 5)
    assert clocks.sharing(5) == 3 and clocks.slowest == 5
    heir = WorkerClocks(Bounded(), range(4))
    heir.load(clocks.state())
    for worker in (0, 3):
        heir.leave(worker)
    assert [heir.sharing(clock) for clock in (3, 4, 5, 6)] == [4, 3, 3, 2]
    late = WorkerClocks(Bounded(), range(2))
    late.leave(0)
    late.load([[0, 7], [1, 3]])
    assert late.sharing(7) == 2 and late.slowest == 3


# -- elastic averaging -------------------------------------------------------------------------------------------------
def pull(theta: Tensor, worker: int, step: int) -> Tensor:
    """Of a quadratic around another place on each worker, so that it matters where the gradient is taken."""
    return theta - torch.tensor([1.0, -2.0, 3.0], dtype=F64) * (worker + 1)


def elastic(workers: int, period: int, steps: int, beta: float, *, before: bool) -> tuple[list[list[Tensor]], Tensor]:
    """Algorithm 1 of arXiv 1412.6651, workers in turn; what each has after every step, and the center.

    Args:
        before: whether the gradient of the step is taken at x, before the pull, as it stands there; else after it.
    """
    alpha = beta / workers
    center = torch.ones(3, dtype=F64)
    own = [center.clone() for _ in range(workers)]
    seen: list[list[Tensor]] = [[] for _ in range(workers)]
    for t in range(steps):
        xs = [x.clone() for x in own]
        if t % period == 0:
            for i in range(workers):
                e = alpha * (own[i] - center)
                own[i], center = own[i] - e, center + e
        for i in range(workers):
            own[i] = own[i] - LR * pull(xs[i] if before else own[i], i, t)
            seen[i].append(own[i].clone())
    return seen, center


@pytest.mark.parametrize("period", [2, 3])
@pytest.mark.parametrize("workers", [2, 3])
def test_elastic_averaging_with_overlap_is_the_published_algorithm(workers: int, period: int) -> None:
    """With overlap the gradient of the step after a pull was taken before it, as published."""
    steps = 4 * period
    want, _ = elastic(workers, period, steps, 0.9, before=True)
    outs = simulate(partial(program, f"easgd(period={period}, overlap=1)", (steps,) * workers, pull), workers)
    for worker, out in enumerate(outs):
        torch.testing.assert_close(torch.stack(out["seen"]), torch.stack(want[worker]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("workers", [2, 3])
def test_elastic_averaging_that_waits_takes_the_gradient_after_the_pull(workers: int, period: int) -> None:
    """Every pull stands before the step that follows it; the last one is made at the end."""
    steps = 4 * period
    want, _ = elastic(workers, period, steps + 1, 0.9, before=False)
    _, center = elastic(workers, period, steps + 1, 0.9, before=False)
    outs = simulate(partial(program, f"easgd(period={period}, overlap=0)", (steps,) * workers, pull), workers)
    for worker, out in enumerate(outs):
        for t in range(steps):
            if (t + 1) % period:  # else a pull is in it already
                torch.testing.assert_close(out["seen"][t], want[worker][t], rtol=0, atol=1e-12)
        torch.testing.assert_close(out["end"], center, rtol=0, atol=1e-12)

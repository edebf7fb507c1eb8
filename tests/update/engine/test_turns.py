# SPDX-License-Identifier: Apache-2.0
"""Synchronous steps in which workers take turns: the same as one worker's steps made by hand, in every program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

N, PROBE = 4, 4
BEGAN = PROBE + 1
"""The choice takes effect after the step that follows the probe."""
GROUPS = [4, 4, 3, *[2] * 9, 1]
"""Of four workers in the rounds after that: ceil(4 / sqrt(4 r / 3))."""
MEMBERS = {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]], 3: [[0, 1], [2], [3]], 4: [[0], [1], [2], [3]]}
Batch = tuple[Tensor, Tensor]


def data(batches: int) -> TensorDataset:
    x = torch.randn(8 * batches, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def network(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh(), nn.Linear(8, 1))


def learn(model: nn.Module, batch: Batch) -> None:
    F.mse_loss(model(batch[0]), batch[1]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def test_turns_are_the_steps_of_one_worker_made_by_hand() -> None:
    """Adam, clipping and a schedule, on all batches of all workers in their order."""

    def body() -> tuple[list[Batch], list[Tensor]]:
        model, used = network(), []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 25)
        with paceline.attach(model, optimizer, rule=f"auto(probe={PROBE})") as run:
            for batch in run.share(DataLoader(data(25 * N), 8, shuffle=True)):
                used.append(tuple(batch))
                optimizer.zero_grad()
                learn(model, batch)
                optimizer.step()
                schedule.step()
        return used, [one.detach() for one in model.parameters()]

    outs = paceline.simulate(body, N)
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(25):
        groups = GROUPS[min(step - BEGAN, len(GROUPS) - 1)] if step >= BEGAN else 1
        together = N / groups if step >= BEGAN else 1.0
        for members in MEMBERS[groups]:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * (1 - 0.9 * step / 25) * together**0.5
                group["betas"] = (0.9 ** (together ** (1 / 3)), 0.999**together)
            gradients = []
            for rank in members:
                model.zero_grad()
                F.mse_loss(model(outs[rank][0][step][0]), outs[rank][0][step][1]).backward()
                gradients.append([one.grad for one in model.parameters()])
            for one, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
                one.grad = torch.stack(parts).mean(0)  # type: ignore[arg-type]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    for _, trained in outs:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(trained, model.parameters(), strict=True))


def skips(run: paceline.Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    return (one for k, one in enumerate(batches) if run.world.rank != 1 or k % 7 != 3)


def leaves(run: paceline.Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    return (one for k, one in zip(range(17), batches, strict=False))


def ahead(run: paceline.Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    """As accelerate's loaders, whose program makes the last step of a pass after its end."""
    now = next(batches)
    for then in batches:
        yield now
        now = then
    yield now


def everything(run: paceline.Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    return batches


@pytest.mark.parametrize(
    ("batches", "takes", "passes", "steps"),
    [
        (20 * N, everything, 1, 60),
        (20 * N + 3, everything, 1, 63),  # the last round of a pass has no batch for one worker, or a piece
        (20 * N, everything, 2, 30),  # a backward pass without a step
        (20 * N, leaves, 1, 51),
        (7 * N, ahead, 1, 21),
        (20 * N, skips, 1, 60),
    ],
)
def test_all_hold_the_same_after_every_step(
    batches: int, takes: Callable[..., Any], passes: int, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the program does with its batches; an evaluation lies between two steps."""

    def body() -> tuple[list[float], list[Tensor], int]:
        model, seen = network(norm=True), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 60)
        run = paceline.attach(model, optimizer, rule="auto")
        loader, held = run.share(DataLoader(data(batches), 8, shuffle=True)), run.share(DataLoader(data(6), 8))
        for _ in range(3):
            for number, batch in enumerate(takes(run, iter(loader))):
                optimizer.zero_grad()
                learn(model, batch)
                if number % passes < passes - 1:
                    continue
                optimizer.step()
                schedule.step()
                seen.append(sum(float(one.detach().double().sum()) for one in model.parameters()))
            model.eval()
            with torch.no_grad():
                for x, _ in held:
                    model(x)
                seen.append(sum(float(one.double().sum()) for one in model.state_dict().values()))
            model.train()
        run.close()
        return seen, [one.clone() for one in model.state_dict().values()], schedule.last_epoch

    outs = paceline.simulate(body, N)
    most = max(len(seen) for seen, _, _ in outs)
    assert most == steps + 3 and {made for _, _, made in outs} == {steps}
    for seen, state, _ in outs:
        assert len(seen) < most or seen == outs[0][0]
        assert all(torch.equal(a, b) for a, b in zip(state, outs[0][1], strict=True))
    assert "no worker trains on what was left" not in caplog.text


def test_a_gradient_that_is_not_finite_is_a_turn_without_a_step() -> None:
    def body() -> list[Tensor]:
        model, before = network(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with paceline.attach(model, optimizer, rule=f"auto(probe={PROBE})") as run:
            for number, batch in enumerate(run.share(DataLoader(data(20 * N), 8))):
                optimizer.zero_grad()
                bad = number == BEGAN and run.world.rank == 2
                (F.mse_loss(model(batch[0]), batch[1]) * (float("nan") if bad else 1.0)).backward()
                optimizer.step()
                before.append(torch.cat([one.detach().flatten() for one in model.parameters()]))
        return before

    outs = paceline.simulate(body, N)
    assert all(torch.equal(a, b) for out in outs for a, b in zip(out, outs[0], strict=True))
    assert all(one.isfinite().all() for one in outs[0])


def test_a_worker_that_makes_no_step_in_its_turn_where_another_does_is_named() -> None:
    def body() -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run = paceline.attach(model, optimizer, rule=f"auto(probe={PROBE})")
        for number, batch in enumerate(run.share(DataLoader(data(20 * N), 8))):
            optimizer.zero_grad()
            learn(model, batch)
            if number != BEGAN + 4 or run.world.rank != 3:  # ranks 2 and 3 have their turn
                optimizer.step()

    with pytest.raises(paceline.PacelineError, match=r"rank 3.* made no step after a backward pass"):
        paceline.simulate(body, N)


@pytest.mark.parametrize("why", ["calls", "own data", "asked not to"])
def test_no_turns_where_workers_cannot_wait(why: str) -> None:
    """The program calls all workers in the middle of a step, or does not ask paceline for its batches."""

    def body() -> bool:
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        rule = "auto(sync_rate=0)" if why == "asked not to" else "auto"
        with paceline.attach(model, optimizer, rule=rule, data="own" if why == "own data" else "shared") as run:
            loader = DataLoader(data(20 * N), 8)
            for batch in loader if why == "own data" else run.share(loader):
                optimizer.zero_grad()
                learn(model, batch)
                if why == "calls":
                    run.messages.all_reduce(torch.ones(1))
                optimizer.step()
            return run._parts.engine.gradient_exchanges.turns is None

    assert paceline.simulate(body, N) == [True] * N

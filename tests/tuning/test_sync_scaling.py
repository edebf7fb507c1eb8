# SPDX-License-Identifier: Apache-2.0
"""The optimizer of one worker in synchronous steps of several."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.tuning.sync_scaling import WARMUP, SyncScaling
from paceline.tuning.tunables import Rates


def adam() -> tuple[torch.Tensor, torch.optim.Optimizer]:
    parameter = torch.zeros(3, requires_grad=True)
    return parameter, torch.optim.AdamW([parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)


def test_rates_rise_to_n_for_sgd_with_momentum_and_to_its_root_for_others() -> None:
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    scaling, (_, other) = SyncScaling(4), adam()
    assert [scaling.rate(sgd, step) for step in (1, WARMUP, 10 * WARMUP)] == [4 / WARMUP, 4, 4]
    assert [scaling.rate(other, step) for step in (1, WARMUP, 10 * WARMUP)] == [2 / WARMUP, 2, 2]
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert [SyncScaling(n).highest(plain) for n in (4, 1024)] == [2, 16] and SyncScaling(64).highest(sgd) == 16
    assert SyncScaling(4, 0.0).rate(sgd, WARMUP) == 1


def test_few_workers_train_together_at_first_and_the_factors_follow_them() -> None:
    """ceil(N / sqrt(r N / 3)) groups in round r, after 5 steps; N together after 3 N rounds."""
    scaling, (_, other) = SyncScaling(8, began=5), adam()
    assert [scaling.groups(5 + r) for r in (1, 2, 3, 4, 5, 24, 25, 1000)] == [8, 5, 4, 3, 3, 2, 1, 1]
    assert scaling.rate(other, 6) == 1 and scaling.rate(other, 7) == pytest.approx(1.6**0.5)
    assert scaling.betas(other, (0.9, 0.99), 9) == pytest.approx((0.9 ** ((8 / 3) ** (1 / 3)), 0.99 ** (8 / 3)))
    assert all(
        sum(SyncScaling(n, began=0).groups(step) - 1 for step in range(1, 5000)) < 6 * n for n in (2, 3, 8, 31, 64, 200)
    )


def test_a_step_has_the_memory_of_as_many_samples_and_the_program_sees_its_own() -> None:
    parameter, optimizer = adam()
    rates, made = Rates([optimizer]), 0
    rates.scale_all(1.0, SyncScaling(8), lambda: made)
    want = torch.optim.Adam([again := torch.zeros(3, requires_grad=True)], betas=(0.9**2, 0.99**8))
    for made in range(2 * WARMUP):
        gradient = torch.randn(3, generator=torch.Generator().manual_seed(made))
        parameter.grad, again.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        want.param_groups[0]["lr"] = 0.1 * 8**0.5 * min(1, (made + 1) / WARMUP)
        want.step()
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.99) and optimizer.param_groups[0]["lr"] == 0.1
    assert torch.allclose(parameter, again, rtol=1e-5)
    rates.close()


def test_betas_that_a_schedule_writes_stay() -> None:
    parameter, optimizer = adam()
    Rates([optimizer]).scale_all(1.0, SyncScaling(8), lambda: 0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["betas"]))
    for first in (0.9, 0.5):
        optimizer.param_groups[0]["betas"] = (first, 0.99)
        parameter.grad = torch.ones(3)
        optimizer.step()
        assert optimizer.param_groups[0]["betas"] == (first, 0.99)
    assert seen == [pytest.approx((first**2, 0.99**8)) for first in (0.9, 0.5)]


def test_the_means_of_the_moments_stay_when_the_memory_changes() -> None:
    """Ten steps with one worker's betas, then those of 8: Adam's next step goes on from the same means."""
    parameter, optimizer = adam()
    for step in range(10):
        parameter.grad = torch.randn(3, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    state, scaling = optimizer.state[parameter], SyncScaling(8)
    before = [state["exp_avg"] / (1 - 0.9**10), state["exp_avg_sq"] / (1 - 0.99**10)]
    scaling.take_over([(optimizer, optimizer.param_groups[0])])
    first, second = scaling.betas(optimizer, (0.9, 0.99), 11)
    assert torch.allclose(state["exp_avg"] / (1 - first**10), before[0])
    assert torch.allclose(state["exp_avg_sq"] / (1 - second**10), before[1])


@pytest.mark.parametrize("closes", [False, True])
def test_virtual_workers_without_a_clock_make_synchronous_steps_where_gradients_can_be_exchanged(closes: bool) -> None:
    """After the probe, with the optimizer of four workers."""

    def program() -> tuple[bool, list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run, rates = paceline.attach(model, optimizer), []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            (loss := model(torch.ones(2, 4)).sum()).backward()
            return loss

        for _ in range(14):
            optimizer.step(closure) if closes else (closure(), optimizer.step())
            rates.append(run._context.tuner.tunables.numbers()["lr"])
        lockstep = run._context.progress.lockstep
        run.close()
        return lockstep, rates[-2:]

    for lockstep, rates in paceline.simulate(program, 4):
        assert lockstep != closes
        assert rates == pytest.approx([0.1 * 4**0.29] * 2 if closes else [0.2 * 14 / WARMUP, 0.2 * 15 / WARMUP])

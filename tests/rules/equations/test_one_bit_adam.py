# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam against its equations, written down once more from the publication."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import paceline
from tests.helpers import rank, simulate
from tests.tables import each_value_fast

LR, EPS, STEPS, N = 0.01, 1e-8, 9, 3
BETAS = (0.8, 0.95)
START = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64)


def gradient(theta: Tensor, worker: int, step: int, part: int) -> Tensor:
    """Of a quadratic that differs from worker to worker and from step to step."""
    g = torch.Generator().manual_seed(1000 * worker + 10 * step + part)
    return theta - torch.randn(12, generator=g, dtype=torch.float64)


def has(worker: int, step: int) -> bool:
    """Whether a worker's loss knows of the parameter that is used now and then; in some steps none does."""
    return (worker + step) % 4 == 0 or step == 5


def reference(warmup: int, passes: int, decay: float, decoupled: bool) -> Tensor:
    """Adam on the mean gradient for T_w steps; then v is frozen, and m is the mean of the workers' moments."""
    theta, m, v = START.clone(), torch.zeros(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
    for t in range(1, STEPS + 1):
        own = [sum(gradient(theta, w, t, k) for k in range(passes)) / passes for w in range(N)]
        if not decoupled:
            own = [g + decay * theta for g in own]
        m = sum(BETAS[0] * m + (1 - BETAS[0]) * g for g in own) / N
        if t <= warmup:
            mean = sum(own) / N
            v = BETAS[1] * v + (1 - BETAS[1]) * mean * mean
        vhat = v / (1 - BETAS[1] ** min(t, warmup))
        if decoupled:
            theta = theta * (1 - LR * decay)
        theta = theta - LR * (m / (1 - BETAS[0] ** t)) / (vhat.sqrt() + EPS)
    return theta


def program(warmup: int, passes: int, decay: float, decoupled: bool, by_hand: bool) -> Tensor:
    model = nn.Module()
    model.p = nn.Parameter(START.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([model.p], lr=LR, betas=BETAS, eps=EPS, weight_decay=decay)
    with paceline.attach(model, optimizer, f"one_bit_adam(warmup={warmup}, codec='dense')", timeout_s=20):
        for t in range(1, STEPS + 1):
            optimizer.zero_grad()
            for k in range(passes):
                g = gradient(model.p.detach(), rank(), t, k) / passes
                if by_hand:
                    model.p.grad = g if model.p.grad is None else model.p.grad + g
                else:
                    (model.p * g).sum().backward()
            optimizer.step()
    return model.p.detach().clone()


@pytest.mark.parametrize(
    ("warmup", "passes", "decays", "by_hand"),
    each_value_fast([1, 2, 5], [1, 3], [(0.0, False), (0.1, False), (0.1, True)], [False, True]),
)
def test_its_steps_are_those_of_the_equations(
    warmup: int, passes: int, decays: tuple[float, bool], by_hand: bool
) -> None:
    decay, decoupled = decays
    want = reference(warmup, passes, decay, decoupled)
    for found in simulate(partial(program, warmup, passes, decay, decoupled, by_hand), N):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


def sparse_reference(warmup: int, decay: float) -> Tensor:
    """A worker without a gradient has one of zero, if another has one; if none has, nothing happens."""
    theta, m, v = START.clone(), torch.zeros(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
    k = frozen = 0
    for t in range(1, STEPS + 1):
        if not any(has(w, t) for w in range(N)):
            continue
        own = [gradient(theta, w, t, 0) if has(w, t) else torch.zeros_like(theta) for w in range(N)]
        own = [g + decay * theta for g in own]
        k += 1
        m = sum(BETAS[0] * m + (1 - BETAS[0]) * g for g in own) / N
        if t <= warmup:
            v, frozen = BETAS[1] * v + (1 - BETAS[1]) * (sum(own) / N) ** 2, frozen + 1
        steps = frozen + max(0, t - warmup)
        vhat = v / (1 - BETAS[1] ** max(frozen, 1))
        update = (m / (1 - BETAS[0] ** steps)) / (vhat.sqrt() + EPS)
        theta = theta - LR * torch.where(v > 0, update, 0.0)
    return theta


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [3, 5])
def test_workers_that_lack_a_gradient(warmup: int, decay: float) -> None:
    def body() -> Tensor:
        model = nn.Module()
        model.p, model.q = nn.Parameter(START.clone()), nn.Parameter(START.clone())
        optimizer = torch.optim.Adam(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=decay)
        with paceline.attach(model, optimizer, f"one_bit_adam(warmup={warmup}, codec='dense')", timeout_s=20):
            for t in range(1, STEPS + 1):
                optimizer.zero_grad()
                loss = model.q.square().sum()
                if has(rank(), t):
                    loss = loss + (model.p * gradient(model.p.detach(), rank(), t, 0)).sum()
                loss.backward()
                optimizer.step()
        return model.p.detach().clone()

    want = sparse_reference(warmup, decay)
    for found in simulate(body, N):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)

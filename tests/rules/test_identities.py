# SPDX-License-Identifier: Apache-2.0
"""Methods that must be the same method: each pair of programs ends with the same model, to rounding or bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.rules.outer import BlockMomentum, Nesterov, Outer
from paceline.rules.outer.base import Coefficients
from tests.helpers import (
    Outcome,
    Place,
    Program,
    adam,
    distance,
    learn,
    make_data,
    make_net,
    momentum_sgd,
    same_bits,
    sgd,
    simulate,
    state_of,
    train,
)

F64 = torch.float64
RECIPES = ("sync", "averaging(period=3)", "bmuf(period=3)", "diloco(period=3)", "averaging(period=3, warmup=4)")
ADAM_RECIPES = (*RECIPES, "bmuf_adam(period=3)")


def run_both(one: str, other: str, **choices: Any) -> tuple[Outcome, Outcome]:
    """Both rules on four workers in float64."""
    return tuple(train(rule, 4, dtype=F64, samples=96, **choices)[0] for rule in (one, other))  # type: ignore[return-value]


def test_averaging_every_step_is_synchronous_sgd() -> None:
    a, b = run_both("averaging(period=1)", "sync")
    assert distance(a.model, b.model) < 1e-12


@pytest.mark.parametrize("nesterov", [True, False])
def test_bmuf_without_momentum_is_averaging(nesterov: bool) -> None:
    a, b = run_both(f"bmuf(period=3, momentum=0, lr=1, nesterov={nesterov})", "averaging(period=3)")
    assert distance(a.model, b.model) < 1e-12


def assert_is_torchs_sgd(outer: Outer, name: str, eta: float, zeta: float, nesterov: bool) -> None:
    """`name` is that of its state."""
    anchor = torch.randn(50, dtype=F64)
    parameter = nn.Parameter(anchor.clone())
    reference = torch.optim.SGD([parameter], lr=zeta, momentum=eta, nesterov=nesterov)
    state, out = {name: torch.zeros(50, dtype=F64)}, torch.empty(50, dtype=F64)
    for _ in range(12):
        d = torch.randn(50, dtype=F64)
        parameter.grad = -d
        reference.step()
        start = outer.step(anchor, d, state, Coefficients(eta, zeta, eta, eta), out)
        assert (start - parameter).abs().max() < 1e-12


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("eta", "zeta"), [(0.75, 1.0), (0.9, 0.7), (0.3, 1.6)])
def test_block_momentum_is_torchs_sgd_on_the_pseudo_gradient(nesterov: bool, eta: float, zeta: float) -> None:
    assert_is_torchs_sgd(BlockMomentum(eta, zeta, nesterov=nesterov), "delta", eta, zeta, nesterov)


def test_nesterov_is_torchs_sgd() -> None:
    assert_is_torchs_sgd(Nesterov(0.9, 0.7), "momentum", 0.9, 0.7, True)


@pytest.mark.parametrize("nesterov", [True, False])
def test_bmuf_of_a_whole_run_is_torchs_sgd_around_local_sgd(nesterov: bool) -> None:
    """The same loop written by hand: four models, a mean, an outer torch.optim.SGD."""
    eta, zeta, period, workers = 0.8, 0.9, 3, 4
    found = train(f"bmuf(period=3, momentum={eta}, lr={zeta}, nesterov={nesterov})", 4, dtype=F64, shuffle=False)[0]
    model = make_net(dtype=F64)
    anchor = [p.detach().clone() for p in model.parameters()]
    delta = [torch.zeros_like(p) for p in anchor]
    outer = torch.optim.SGD(model.parameters(), lr=zeta, momentum=eta, nesterov=nesterov)
    x, y = make_data(dtype=F64).tensors
    for _ in range(2):  # 48 samples, 4 workers, batches of 4: three rounds an epoch
        locals_ = [copy.deepcopy(model) for _ in range(workers)]
        for rank, local in enumerate(locals_):
            optimizer = sgd(local.parameters())
            for step in range(period):
                begin = (step * workers + rank) * 4
                learn(local, optimizer, x[begin : begin + 4], y[begin : begin + 4])
        for k, p in enumerate(model.parameters()):
            mean = torch.stack([list(local.parameters())[k].detach() for local in locals_]).mean(0)
            p.grad = p.detach() - mean
            delta[k] = eta * delta[k] + zeta * (mean - p.detach())
            anchor[k] += delta[k]
        outer.step()
    for name, want in zip(found.model, anchor, strict=True):
        assert (found.model[name] - want).abs().max() < 1e-12


def plain(optimizer: Any, **choices: Any) -> dict[str, torch.Tensor]:
    """The user's program without paceline, as `Program` has it."""
    torch.manual_seed(5)
    model = make_net(dropout=0.2, norm=True)
    torch.manual_seed(99)
    opt = optimizer(model.parameters())
    loader = DataLoader(make_data(46), 4, shuffle=True)
    for _ in range(2):
        for x, y in loader:
            learn(model, opt, x, y)
    return state_of(model)


@pytest.mark.parametrize("rule", ADAM_RECIPES)
@pytest.mark.parametrize("launch", ["virtual", "none"])
def test_one_worker_is_the_users_program(rule: str, launch: str) -> None:
    for optimizer in (adam,) if rule.startswith("bmuf_adam") else (adam, momentum_sgd):
        program = Program(rule, optimizer=optimizer, dropout=0.2, norm=True, samples=46)
        found = program() if launch == "none" else simulate(program, 1)[0]
        want = plain(optimizer)
        assert same_bits(found.model, want)
        assert same_bits(found.exported, want)
        assert found.bytes_sent == 0


@pytest.mark.parametrize("samples", [96, 96 + 9, 96 + 12])
def test_synchronous_workers_are_one_worker_with_their_batches_together(samples: int) -> None:
    many = train("sync", 4, dtype=F64, samples=samples, shuffle=False)[0]
    one = train("sync", 1, dtype=F64, samples=samples, shuffle=False, batch=16)[0]
    assert many.minibatches == one.minibatches
    assert distance(many.model, one.model) < 1e-12


@pytest.mark.parametrize("rule", ["bmuf(period=3, momentum=0.75, lr=1)", "bmuf(period=3, gain='paper')"])
def test_with_block_rate_one_the_exported_model_is_the_mean_of_the_locals(rule: str) -> None:
    def before(place: Place) -> None:
        place.extra["grads"] = [p.grad.clone() for p in place.model.parameters()]
        place.extra["before"] = [p.detach().clone() for p in place.model.parameters()]

    def after(place: Place) -> None:
        if place.run.minibatches % 3 == 0:
            local = [p - 0.1 * g for p, g in zip(place.extra["before"], place.extra["grads"], strict=True)]
            exported = [p.detach().clone() for p in place.run.model_for_export().parameters()]
            own = [p.detach().clone() for p in place.model.parameters()]
            place.extra.setdefault("blocks", []).append((local, exported, own))

    outs = train(rule, 4, dtype=F64, samples=144, before_step=before, after_step=after)
    blocks = list(zip(*(out.extra["blocks"] for out in outs), strict=True))
    assert len(blocks) == 6
    for block in blocks:
        mean = [torch.stack(ps).mean(0) for ps in zip(*(local for local, _, _ in block), strict=True)]
        for _, exported, own in block:
            assert all((a - b).abs().max() < 1e-12 for a, b in zip(exported, mean, strict=True))
            assert any((a - b).abs().max() > 1e-6 for a, b in zip(own, mean, strict=True))  # looked ahead


def test_bmuf_adam_without_momentum_averages_the_moments_and_counts_tau() -> None:
    def after(place: Place) -> None:
        state = place.optimizer.state[next(iter(place.model.parameters()))]
        place.extra.setdefault("k", []).append(float(state["step"]))
        place.extra.setdefault("m", []).append((state["exp_avg"].clone(), state["exp_avg_sq"].clone()))

    choices: dict[str, Any] = {"optimizer": adam, "dtype": F64, "samples": 96, "after_step": after}
    ours = train("bmuf_adam(period=3, momentum=0, lr=1)", 4, **choices)[0]
    theirs = train("averaging(period=3, local_state='average')", 4, **choices)[0]
    assert ours.extra["k"] == [float(k) for k in range(1, 13)]
    for mine, other in zip(ours.extra["m"], theirs.extra["m"], strict=True):
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(mine, other, strict=True))
    assert distance(ours.model, theirs.model) < 1e-12

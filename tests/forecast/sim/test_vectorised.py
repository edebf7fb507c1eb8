# SPDX-License-Identifier: Apache-2.0
"""Stacked workers end where virtual workers end, and what cannot be stacked is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.errors import UnsupportedError
from paceline_plugins.forecast import simulate_stacked
from tests.helpers import CLASSES, FEATURES, adam, follow, make_net, momentum_sgd, sgd

N, STEPS = 3, 23
Make = Callable[[Any], torch.optim.Optimizer]


def batches(steps: int = STEPS, workers: int = N, size: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs (steps, N, size, FEATURES) and their classes."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(steps, workers, size, FEATURES, generator=g)
    return x, (x @ torch.randn(FEATURES, CLASSES, generator=g)).argmax(-1)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def falling(step: int) -> float:
    return 1.0 / (1 + 0.1 * step)


def plain(rule: str, make: Make, largest: float | None, rated: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The same with virtual workers and the production code."""
    x, y = batches()

    def program() -> tuple[dict[str, Tensor], Tensor]:
        model = make_net()
        optimizer = make(model.parameters())
        rates = [group["lr"] for group in optimizer.param_groups]
        losses = []
        with paceline.attach(model, optimizer, rule, guard=None) as run:
            for step in range(STEPS):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * (falling(step) if rated else 1.0)
                optimizer.zero_grad()
                loss = loss_of(model, x[step, run.world.rank], y[step, run.world.rank])
                loss.backward()
                if largest is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), largest)
                optimizer.step()
                losses.append(loss.detach())
        return dict(run.model_for_export().named_parameters()), torch.stack(losses)

    outs = paceline.simulate(program, N)
    assert outs[0] is not None
    return outs[0][0], torch.stack([out[1] for out in outs if out is not None], 1)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


RULES: list[tuple[str, Make]] = [
    ("sync", sgd),
    ("sync", momentum_sgd),
    ("sync", adam),
    ("averaging(period=4)", sgd),
    ("averaging(period=4, local_state='keep')", momentum_sgd),
    ("averaging(period=4)", adam),
    ("bmuf(period=4)", momentum_sgd),
    ("bmuf(period=4, warmup=5, ramp=2, local_state='compensate')", momentum_sgd),
    ("bmuf(period=3, nesterov=False, gain='paper')", sgd),
    ("bmuf(period=4)", adamw),
    ("bmuf(period=4, amplify=0.5)", momentum_sgd),
    ("bmuf_adam(period=4, amplify=1)", adam),
    ("bmuf(period=4, warmup=5, ema=0.7)", momentum_sgd),
    ("bmuf_adam(period=4, nesterov=False)", adam),
    ("diloco(period=4)", momentum_sgd),
    ("bmuf_adam(period=4)", adam),
    ("bmuf_adam(period=4, warmup=5)", adamw),
    ("bmuf_adam(period=4, local_state='average')", adam),
    ("bmuf_adam(period=4, local_state='reset')", adam),
    ("diloco(period=4, gain='paper')", adamw),
    ("diloco(period=4, warmup=2, ramp=3)", momentum_sgd),
]


@pytest.mark.parametrize(("rule", "make"), RULES, ids=[f"{r}-{m.__name__}" for r, m in RULES])
def test_stacked_workers_end_where_virtual_ones_do(rule: str, make: Make) -> None:
    """23 steps are not a whole number of blocks, so the last, short one is merged as well."""
    model = make_net()
    start = [p.detach().clone() for p in model.parameters()]
    stacked = simulate_stacked(
        model, loss_of, make(model.parameters()), rule, zip(*batches(), strict=True), rate=falling, largest_gradient=0.5
    )
    parameters, losses = plain(rule, make, 0.5, True)
    assert stacked.losses.shape == (STEPS, N)
    torch.testing.assert_close(stacked.losses, losses, atol=1e-5, rtol=0)
    for name, p in parameters.items():
        torch.testing.assert_close(stacked.parameters[name], p.detach(), atol=1e-5, rtol=0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))


def test_one_worker_is_the_users_own_program() -> None:
    model, twin = make_net(), make_net()
    x, y = batches(workers=1)
    stacked = simulate_stacked(model, loss_of, momentum_sgd(model.parameters()), "bmuf", zip(x, y, strict=True))
    optimizer = momentum_sgd(twin.parameters())
    for step in range(STEPS):
        follow(optimizer, loss_of(twin, x[step, 0], y[step, 0]))
    for name, p in twin.named_parameters():
        torch.testing.assert_close(stacked.parameters[name], p.detach(), atol=1e-6, rtol=0)


def test_frozen_parameters_groups_and_one_tensor_a_step() -> None:
    """A batch may be one tensor; what does not learn stays out; each group keeps its own rate."""
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[1].requires_grad_(False)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    x, _ = batches()
    out = simulate_stacked(model, lambda m, x: m(x).square().mean(), optimizer, "averaging(period=2)", x)
    assert sorted(out.parameters) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    torch.testing.assert_close(out.parameters["0.weight"], model[0].weight.detach())
    assert (out.parameters["2.weight"] - model[2].weight).abs().max() > 0.01


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("bmuf(codec='int8')", "Int8"),
        ("bmuf(fragments=2)", "fragments=2"),
        ("bmuf(within='host')", 'within="host"'),
        ("asgd", "each by itself"),
        ("one_bit_adam", "FirstMoment"),
    ],
)
def test_a_rule_that_cannot_be_stacked_is_refused(rule: str, says: str) -> None:
    model = make_net()
    with pytest.raises(UnsupportedError, match="cannot be simulated stacked") as caught:
        simulate_stacked(model, loss_of, adam(model.parameters()), rule, zip(*batches(), strict=True))
    assert says in str(caught.value)


class Choosy(nn.Module):
    """Looks at its data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x if x.sum() > 0 else -x)


class Recurrent(nn.Module):
    """Torch's LSTM, which it cannot stack."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.LSTM(FEATURES, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x[:, None])[0][:, 0])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (make_net(dropout=0.5), "cannot be stacked"),
        (Choosy(), "cannot be stacked"),
        (Recurrent(), "cannot be stacked: .*lstm"),
        (make_net(dtype=torch.bfloat16), "only float32 and float64"),
    ],
    ids=["dropout", "choosy", "recurrent", "bfloat16"],
)
def test_a_model_that_cannot_be_stacked_is_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        simulate_stacked(model, loss_of, sgd(model.parameters()), "sync", zip(*batches(), strict=True))


def test_an_optimizer_that_cannot_be_stacked_is_refused() -> None:
    model = make_net()

    def run(optimizer: torch.optim.Optimizer) -> None:
        simulate_stacked(model, loss_of, optimizer, "sync", zip(*batches(), strict=True))

    with pytest.raises(UnsupportedError, match="RMSprop is not known to be element-wise"):
        run(torch.optim.RMSprop(model.parameters()))
    with pytest.raises(UnsupportedError, match="must hold exactly"):
        run(sgd(list(model.parameters())[1:]))
    used = momentum_sgd(model.parameters())
    loss_of(model, *(part[0, 0] for part in batches())).backward()
    used.step()
    with pytest.raises(UnsupportedError, match="fresh"):
        run(used)


def test_shapes_that_do_not_fit_are_refused() -> None:
    model, (x, y) = make_net(), batches()
    for wrong in ([], [(x[0], y[0, :2])], [(x[0], y[0]), (x[1, :2], y[1, :2])]):
        with pytest.raises(UnsupportedError):
            simulate_stacked(model, loss_of, sgd(model.parameters()), "sync", wrong)
    with pytest.raises(UnsupportedError, match="scalar"):
        simulate_stacked(model, lambda m, x, y: m(x), sgd(model.parameters()), "sync", [(x[0], y[0])])

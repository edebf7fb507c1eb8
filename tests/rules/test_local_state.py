# SPDX-License-Identifier: Apache-2.0
"""The law of local steps: on a constant gradient a block moves a worker as far as the program's own steps.

A block that restarts the momentum of the user's optimizer moves less far, and trains at a lower rate than was asked
for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.rules import payload
from paceline.rules.schedule.growth import RATE_EXPONENT
from paceline.update.engine.blocks.fragment import LocalOptimizers
from tests.helpers import simulate

WORKERS, STEPS = 3, 10
Make = Callable[[Any], torch.optim.Optimizer]
Distances = list[Tensor]
"""Of each step, how far the optimizer moved the parameters."""


class Lion(torch.optim.Optimizer):
    """An optimizer that paceline does not know: it keeps a momentum and steps by its sign."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
            p.add_((0.5 * m + 0.5 * p.grad - 0.3).sign(), alpha=-self.param_groups[0]["lr"])
            m.mul_(0.9).add_(p.grad, alpha=0.1)


OPTIMIZERS: dict[str, Make] = {
    "SGD": partial(torch.optim.SGD, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "Nesterov": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "dampening": partial(torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.5),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9),
    "Lion": Lion,
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = partial(torch.optim.Muon, lr=0.01, weight_decay=0.0)
RULES = [
    "averaging(period=4)",
    "bmuf(period=4)",
    "bmuf(period=4, nesterov=False)",
    "bmuf(period=4, overlap=2)",
    "bmuf(period=4, fragments=2)",
    "bmuf(period=4, warmup=3)",
    "diloco(period=4)",
    "streaming_diloco(period=4, fragments=2)",
    "auto(first=4, longest=4, probe=0)",
    "asgd(period=4)",
    "ssp(staleness=2, period=4)",
    "ssp(staleness=0, period=4)",
    "easgd(period=4)",
]
ADAM_RULES = ["bmuf_adam(period=4)", "bmuf_adam(period=4, overlap=2, fragments=2)"]
ALL = [*RULES, *ADAM_RULES]
FAST = ("averaging(period=4)", "bmuf(period=4, overlap=2)", "auto(first=4, longest=4, probe=0)", "bmuf_adam(period=4)")


def distances(
    rule: str | None,
    make: Make,
    factor: Callable[[paceline.Run], float] = lambda run: 1.0,
    begin: Callable[[paceline.Run], object] = lambda run: None,
) -> Distances:
    """A worker's program, whose gradient is the same at every step; how far each step of its optimizer went.

    Args:
        rule: None for the program without paceline.
        make: makes the optimizer.
        factor: the loss is multiplied by it.
        begin: called before the first step.
    """
    model = nn.ParameterDict({"w": torch.linspace(-1, 1, 24).view(4, 6).double(), "v": torch.ones(2, 3).double()})
    slope = {name: torch.arange(1.0, p.numel() + 1).view_as(p).cos().double() for name, p in model.items()}
    optimizer = make(model.parameters())
    found: Distances = []
    before: list[Tensor] = []

    def flat() -> Tensor:
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    optimizer.register_step_pre_hook(lambda *_: before.append(flat()))
    optimizer.register_step_post_hook(lambda *_: found.append(flat() - before.pop()))  # before paceline's exchanges
    run = paceline.attach(model, optimizer, rule) if rule is not None else None
    if run is not None:
        begin(run)
    data = DataLoader(TensorDataset(torch.ones(STEPS if run is None else WORKERS * STEPS)), 1)
    for (x,) in data if run is None else run.share(data):
        optimizer.zero_grad()
        loss = sum((slope[name] * p).sum() for name, p in model.items()) * x.squeeze()
        (loss if run is None else loss * factor(run)).backward()
        optimizer.step()
    if run is not None:
        run.close()
    return found


@functools.cache
def program(name: str) -> Distances:
    """The program's own steps with this optimizer."""
    return distances(None, OPTIMIZERS[name])


def assert_as_far(ours: Distances, alone: Distances, times: float = 1.0) -> None:
    assert ours
    for step, (one, other) in enumerate(zip(ours, alone, strict=False), 1):
        assert torch.allclose(one, times * other, rtol=1e-6, atol=1e-12), f"step {step}: {one} is not {times} {other}"


@pytest.mark.parametrize("rule", [rule if rule in FAST else pytest.param(rule, marks=pytest.mark.full) for rule in ALL])
def test_a_block_moves_a_worker_as_far_as_the_programs_own_steps(rule: str) -> None:
    """`auto` says that it multiplies the rate."""
    of = {name: make for name, make in OPTIMIZERS.items() if rule in RULES or name in ("Adam", "AdamW")}
    times = WORKERS**RATE_EXPONENT if rule.startswith("auto") else 1.0
    for worker in simulate(lambda: {name: distances(rule, make) for name, make in of.items()}, WORKERS):
        for name in of:
            assert len(worker[name]) == STEPS
            assert_as_far(worker[name], program(name), times)


def test_a_block_that_resets_the_momentum_says_that_it_moves_a_worker_less_far() -> None:
    worker = simulate(partial(distances, "bmuf(period=4, local_state='reset')", OPTIMIZERS["momentum"]), 2)[0]
    block, slope = torch.stack(worker[4:8]).mean(0), program("SGD")[0]
    assert torch.allclose(block, 10 * 0.226 * slope, rtol=1e-2)  # 10 times as far with a momentum of 0.9 at its height
    assert "0.23 times" in (payload.__doc__ or "")


def test_a_compensated_momentum_is_ahead_of_the_programs() -> None:
    rule, alone = "bmuf(period=4, local_state='compensate')", program("momentum")
    worker = simulate(partial(distances, rule, OPTIMIZERS["momentum"]), WORKERS)[0]
    assert_as_far(worker[:4], alone)
    assert (torch.stack(worker[4:8]).abs() > torch.stack(alone[4:8]).abs()).all()
    assert "ahead of the program's" in (payload.__doc__ or "")


@pytest.mark.parametrize("rule", ["bmuf(period=4)", "averaging(period=4)", "bmuf(period=4, overlap=2)"])
def test_after_a_rejected_block_only_its_worker_begins_with_fresh_momentum(rule: str) -> None:
    """Its own may be what was rejected: here it is inf."""

    def factor(run: paceline.Run) -> float:
        return float("inf") if run.world.rank == 1 and run.minibatches == 6 else 1.0

    alone = program("momentum")
    one, bad, other = simulate(partial(distances, rule, OPTIMIZERS["momentum"], factor), WORKERS)
    for worker in (one, other):
        assert_as_far(worker, alone)
    assert_as_far(bad[8:], alone)


@pytest.mark.parametrize(("rule", "kept"), [("bmuf", True), ("bmuf(local_state='reset')", False)])
def test_a_worker_that_joins_keeps_the_momentum_that_a_living_one_sent(rule: str, kept: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = torch.full((3,), 2.0)  # as the checkpoint of the donor has it
    own = LocalOptimizers(paceline.rule_from_text(rule).delta, [(optimizer, [("weight", parameter)])])
    own.count()
    own.begin_block(averaged=False)
    assert bool(optimizer.state[parameter]["momentum_buffer"].any()) == kept

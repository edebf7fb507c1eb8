# SPDX-License-Identifier: Apache-2.0
"""Muon as the optimizer of the workers, with AdamW for what is not a matrix (MuLoCo, arXiv 2505.23725)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.core.optimizer_state import ensure_state, moments, reset_state
from paceline.errors import UnsupportedError
from paceline_plugins.forecast import simulate_stacked
from tests.helpers import same_bits, simulate
from tests.update.engine.muon_training import Training

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")

RULES = [
    "sync",
    "auto(first=3)",
    "diloco(period=3, momentum=0.6, lr=0.7)",
    "bmuf(period=3, local_state='reset')",
    "bmuf(period=3, local_state='average')",
    "bmuf(period=3, local_state='compensate', warmup=2)",
    "bmuf(period=4, local_state='compensate', overlap=2, fragments=2)",
]


@pytest.mark.parametrize("rule", RULES)
def test_the_laws_hold(rule: str, tmp_path: Path) -> None:
    """One worker is the program, workers agree, and a resumed run has the same bits, or goes on with fewer workers."""
    alone, _ = simulate(Training(rule), 1)[0]
    assert same_bits(alone, Training(None)()[0])
    whole = simulate(Training(rule), 3)
    assert all(same_bits(model, whole[0][0]) for model, _ in whole)
    simulate(Training(rule, steps=7, save=tmp_path / "c"), 3)
    for model, _ in simulate(Training(rule, resume=tmp_path / "c"), 3):
        assert same_bits(model, whole[0][0])
    fewer = simulate(Training(rule, resume=tmp_path / "c"), 2)
    assert same_bits(fewer[0][0], fewer[1][0])


def buffers(run: paceline.Run, optimizers: list[Any]) -> list[torch.Tensor]:
    return [state["momentum_buffer"].clone() for state in optimizers[0].state.values()]


@pytest.mark.parametrize(
    ("state", "alike"), [("auto", False), ("keep", False), ("average", True), ("compensate", True), ("reset", True)]
)
def test_what_a_block_begins_with(state: str, alike: bool) -> None:
    """9 steps are three blocks; "auto" keeps the buffers."""
    rule = f"bmuf(period=3, local_state={state!r})"
    one, other = (seen for _, seen in simulate(Training(rule, steps=9, look=buffers), 2))
    assert len(one) == 2
    assert all(torch.equal(a, b) == alike for a, b in zip(one, other, strict=True))
    assert all((float(a.abs().max()) == 0) == (state == "reset") for a in one)


def test_the_average_is_the_workers_mean() -> None:
    """In a first block of 3 steps no worker knows of the other, whatever becomes of the buffers at its end."""
    kept, averaged = (
        [seen for _, seen in simulate(Training(f"bmuf(period=3, local_state={state!r})", steps=3, look=buffers), 2)]
        for state in ("keep", "average")
    )
    for a, b, mean in zip(*kept, averaged[0], strict=True):
        torch.testing.assert_close(mean, (a + b) / 2)


def test_a_constant_gradient_stays_when_the_buffer_is_compensated() -> None:
    """B_k = (1 - b^k) g: with kv virtual steps the buffer stands at k + kv; by hand after one block of 2."""
    gradient, b, gain = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), 0.9, 2.0

    def program() -> torch.Tensor:
        model = nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.Muon(model.parameters(), lr=0.01, momentum=b)
        rule = f"bmuf(period=2, local_state='compensate', momentum={1 - 1 / gain}, lr=1)"
        with paceline.attach(model, optimizer, rule):
            for _ in range(2):
                model.weight.grad = gradient.clone()
                optimizer.step()
            found: torch.Tensor = optimizer.state[model.weight]["momentum_buffer"].clone()
        return found

    steps = 2 + (1 - 1 / gain) * 2  # kv = eta rho + (zeta - 1) tau
    for found in simulate(program, 2):
        torch.testing.assert_close(found, (1 - b**steps) * gradient)


def test_a_parameter_without_a_gradient_on_some_workers() -> None:
    """All begin the next block with the mean, also who had no buffer yet."""

    def program() -> float:
        model = nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.Muon(model.parameters(), lr=0.01, momentum=0.5)
        with paceline.attach(model, optimizer, "averaging(period=1, local_state='average')") as run:
            if run.world.rank == 0:
                model.weight.grad = torch.ones(2, 2)
            optimizer.step()
            found = float(optimizer.state[model.weight]["momentum_buffer"][0, 0])
        return found

    assert simulate(program, 2) == [0.25, 0.25]


def test_the_state_is_made_and_reset_in_place() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.Muon([parameter], momentum=0.8)
    (moment,) = moments(optimizer)
    assert (moment.key, moment.decay(optimizer.param_groups[0]), moment.square) == ("momentum_buffer", 0.8, False)
    ensure_state(optimizer, parameter)
    buffer = optimizer.state[parameter]["momentum_buffer"]
    parameter.grad = torch.ones(3, 2)
    optimizer.step()
    assert optimizer.state[parameter]["momentum_buffer"] is buffer and float(buffer[0, 0]) == pytest.approx(0.2)
    reset_state(optimizer, [parameter])
    assert optimizer.state[parameter]["momentum_buffer"] is buffer and not bool(buffer.any())


def test_where_muon_cannot_be() -> None:
    model = nn.Linear(2, 2, bias=False)
    muon = torch.optim.Muon(model.parameters())
    with pytest.raises(UnsupportedError, match="Muon is not known to be element-wise; use torch's SGD, Adam or AdamW"):
        simulate_stacked(model, lambda m, x: m(x).sum(), muon, "diloco", [torch.zeros(2, 1, 2)])
    with pytest.raises(UnsupportedError, match="the optimizer is Muon; use "):
        paceline.attach(model, muon, "bmuf_adam")

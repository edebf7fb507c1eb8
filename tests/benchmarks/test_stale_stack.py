# SPDX-License-Identifier: Apache-2.0
"""Stacked asynchronous trainings are those of paceline's parameter server on the simulated clock."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.forecast.sim.clock import Clock, uniform
from tests.benchmarks.modules import imported
from tests.helpers import attached

pytestmark = pytest.mark.plugins

WORKERS, MINIBATCHES, RATE, CLASSES = 4, 40, 0.1, 26


@pytest.fixture
def stack() -> Iterator[ModuleType]:
    with imported("_stale_stack") as found:
        yield found["_stale_stack"]


def served(stack: ModuleType, rule: str, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The model that the parameter server ends with, when every minibatch is `batch`."""

    def program() -> Tensor:
        model = nn.ParameterList([nn.Parameter(stack.initial(CLASSES, 0))])
        with attached(model, rule, lr=RATE) as (run, _, optimizer):
            for _ in run.share([torch.zeros(1)] * MINIBATCHES):
                model[0].grad = stack.gradients(model[0].detach()[None], *batch, CLASSES)[0]
                optimizer.step()
        return run.model_for_export()[0].detach().clone()

    found = paceline.simulate(program, WORKERS, clock=Clock(uniform(), seed=0))[0]
    assert found is not None
    return found


@pytest.mark.parametrize(
    "rule", ["asgd(overlap=0)", "dc_asgd(strength=40.0, overlap=0)", "dc_asgd(kind='normalized', start=9, overlap=0)"]
)
def test_a_row_ends_where_the_parameter_server_ends(stack: ModuleType, rule: str) -> None:
    dice = torch.Generator().manual_seed(3)
    batch = torch.randn(8, 1, 16, 16, generator=dice), torch.randint(CLASSES, (8,), generator=dice)
    row = stack.Row("row", WORKERS, RATE, rule, 2 * MINIBATCHES, 0)  # at its first rate all the time
    rows = stack.Stack([row, stack.Row("alone", 1, RATE, "", 2 * MINIBATCHES, 0)], batch, CLASSES)
    rows.minibatch = lambda: batch
    for _ in range(MINIBATCHES):
        rows.step()
    torch.testing.assert_close(rows.values[0], served(stack, rule, batch), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(rows.values[0], rows.values[1], rtol=1e-2, atol=1e-4)


def test_a_step_in_lockstep_is_one_with_the_sum_of_the_gradients(stack: ModuleType) -> None:
    dice = torch.Generator().manual_seed(4)
    data = torch.randn(64, 18, 18, generator=dice), torch.randint(CLASSES, (64,), generator=dice)
    rows = stack.Stack([stack.Row("synchronous", 4, RATE, "lockstep", 64, 1)], data, CLASSES, batch=8)
    before, found = rows.values.clone(), [rows.step() for _ in range(4)]
    assert all(torch.equal(origin, before) for _, origin, _ in found)
    torch.testing.assert_close(rows.values, before - RATE * sum(pushed for pushed, _, _ in found))


def test_the_exact_hessian_is_the_change_of_the_gradient(stack: ModuleType) -> None:
    """To first order; in double precision, where a small step crosses no kink."""
    dice = torch.Generator().manual_seed(5)
    batch = torch.randn(8, 1, 16, 16, generator=dice, dtype=torch.float64), torch.randint(CLASSES, (8,), generator=dice)
    at = stack.initial(CLASSES, 0).double()[None]
    along = torch.randn(at.shape, generator=dice, dtype=torch.float64)
    step = 1e-7
    change = (stack.gradients(at + step * along, *batch, CLASSES) - stack.gradients(at, *batch, CLASSES)) / step
    torch.testing.assert_close(stack.hessian_times(at, along, *batch, CLASSES), change, rtol=1e-3, atol=1e-4)


def test_cells_compare_with_the_same_seeds_and_rate() -> None:
    def line(method: str, workers: int, seed: int, loss: float | None, rate: float = 0.3) -> dict[str, Any]:
        row = {"method": method, "workers": workers, "rate": rate, "rule": method, "minibatches": 9, "seed": seed}
        return row | {"loss": loss, "error": loss}

    lines = [line("one worker", 1, seed, 1.0 + seed) for seed in (0, 1)]
    lines += [line("asgd", 8, seed, 1.4 + seed) for seed in (0, 1)] + [line("asgd", 16, 0, 9.0)]
    lines += [line("adaptive", 8, 0, 1.1), line("adaptive", 8, 1, 2.1), line("adaptive", 8, 0, 1.1, rate=0.2)]
    lines += [line("constant", 8, 0, 1.1), line("constant", 8, 1, None)]
    with imported("delay_compensation") as found:
        cells = found["delay_compensation"].cells(lines)
    closed = {(cell["method"], cell["workers"], cell["rate"]): cell["gap_closed"] for cell in cells}
    assert closed["adaptive", 8, 0.3] == pytest.approx(0.75)
    assert (closed["one worker", 1, 0.3], closed["asgd", 8, 0.3]) == (None, 0.0)  # nobody else has 1 worker
    assert closed["adaptive", 8, 0.2] is None and closed["constant", 8, 0.3] is None
    (adaptive,) = (cell for cell in cells if cell["method"] == "adaptive" and cell["rate"] == 0.3)
    assert adaptive["over_one_worker"] == pytest.approx(1.6 / 1.5 - 1, abs=1e-4) and adaptive["seeds"] == [0, 1]

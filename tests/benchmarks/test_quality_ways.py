# SPDX-License-Identifier: Apache-2.0
"""The benchmark of quality: asynchronous training is the server's, and what one worker or the held-out loss changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.forecast.sim.clock import Clock, exponential
from paceline.rules.recipes import rule_from_text
from tests.benchmarks.modules import FOLDER, imported
from tests.helpers import attached

NAMES = ("_quality_asgd", "_quality_methods", "_quality_tasks")
WORKERS, MINIBATCHES, RATE = 3, 24, 0.05
ASGD = "asgd(overlap=0)"

if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not beside the package", allow_module_level=True)


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Modules of the benchmark, which go out of sight again."""
    with imported(*NAMES) as found:
        yield found


def model() -> nn.Module:
    """The start of all trainings."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss."""
    loss: Tensor = (model(x)[:, 0] - y).square().mean()
    return loss


def batches() -> list[tuple[Tensor, Tensor]]:
    """Minibatches, (2, 3) and (2,)."""
    dice = torch.Generator().manual_seed(1)
    return [(torch.randn(2, 3, generator=dice), torch.randn(2, generator=dice)) for _ in range(MINIBATCHES)]


def weights(of: nn.Module) -> Tensor:
    """All of a model's."""
    return nn.utils.parameters_to_vector(of.parameters()).detach()


def plain(count: int = MINIBATCHES, largest: float | None = None) -> Tensor:
    """One worker, the plain loop."""
    mine = model()
    optimizer = torch.optim.SGD(mine.parameters(), lr=RATE)
    for x, y in batches()[:count]:
        optimizer.zero_grad()
        loss_of(mine, x, y).backward()
        if largest is not None:
            nn.utils.clip_grad_norm_(mine.parameters(), largest)
        optimizer.step()
    return weights(mine)


def late(
    modules: dict[str, ModuleType], workers: int, order: Sequence[int], rule: str = ASGD, largest: float | None = None
) -> Tensor:
    """Asynchronous training as the benchmark makes it, on minibatches in this order."""
    mine, given, clock = model(), batches(), Clock(exponential(), seed=5)
    group = modules["_quality_asgd"].StaleWorkers(mine, loss_of, workers, rule_from_text(rule).outer)
    group.train(iter([given[place] for place in order]), lambda done: RATE, clock, largest)
    return weights(mine)


def by_the_server(rule: str) -> tuple[Tensor, list[int]]:
    """The same by the package's own server, and the order in which its workers took the minibatches."""
    order, places = [], [(*batch, torch.tensor([place])) for place, batch in enumerate(batches())]

    def train() -> Tensor:
        with attached(model(), rule, lr=RATE) as (run, mine, optimizer):
            for x, y, place in run.share(places):
                order.append(int(place))
                optimizer.zero_grad()
                loss_of(mine, x, y).backward()
                optimizer.step()
        return weights(run.model_for_export())

    return paceline.simulate(train, WORKERS, clock=Clock(exponential(), seed=5))[0], order


@pytest.mark.parametrize("rule", [ASGD, "dc_asgd(kind='adaptive', strength=2.0, overlap=0)", "adadelay(overlap=0)"])
def test_gradients_of_older_models_are_those_of_the_packages_server(modules: dict[str, ModuleType], rule: str) -> None:
    expected, order = by_the_server(rule)
    found = late(modules, WORKERS, order, rule)
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(found, late(modules, 1, order), atol=1e-4)


@pytest.mark.parametrize("largest", [None, 0.5])
def test_one_asynchronous_worker_is_the_plain_loop(modules: dict[str, ModuleType], largest: float | None) -> None:
    found = late(modules, 1, range(MINIBATCHES), largest=largest)
    assert torch.allclose(found, plain(largest=largest), atol=1e-6)
    assert (largest is None) == torch.allclose(found, plain(), atol=1e-4)


def test_moments_are_averaged_alone_where_a_method_says_so(modules: dict[str, ModuleType]) -> None:
    adam = modules["_quality_tasks"].TASKS["frames-adam"]
    rule = modules["_quality_methods"].Method.of("uncompensated-beta1=0.9").rule(adam)
    assert (rule.payload.local_state, rule.payload.beta1) == ("average", 0.9)

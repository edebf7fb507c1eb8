# SPDX-License-Identifier: Apache-2.0
"""Stacked workers whose number grows: from stage to stage everything goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import RuleError, UnsupportedError
from paceline.rules.schedule import Growth
from paceline.rules.schedule.growth import rate_factor
from paceline_plugins.forecast import simulate_grown, simulate_stacked
from tests.forecast.sim.test_vectorised import batches, loss_of
from tests.helpers import adam, make_net, momentum_sgd

RULES = ["bmuf(period=2, gain=1.4)", "bmuf_adam(period=2, gain=1.4)", "averaging(period=2, local_state='keep')"]
AT_ONCE = Growth(first=2, threshold=1e-9, blocks=1)
NEVER = Growth(first=2, threshold=1e9, blocks=1)
Make = Callable[[Any], torch.optim.Optimizer]


def made_for(rule: str) -> Make:
    return adam if "adam" in rule else momentum_sgd


def one_by_one(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(steps, N, ..) as minibatches in the order in which the workers take them."""
    return [(x[step, worker], y[step, worker]) for step in range(len(x)) for worker in range(x.shape[1])]


@pytest.mark.parametrize("rule", RULES)
def test_a_number_that_never_grows_is_that_of_stacked_workers(rule: str) -> None:
    x, y = batches(12, 2)
    model, make = make_net(), made_for(rule)
    grown = simulate_grown(
        model, loss_of, make(model.parameters()), rule, one_by_one(x, y), 8, growth=NEVER, rate=lambda *_: 1.0
    )
    plain = simulate_stacked(model, loss_of, make(model.parameters()), rule, zip(x, y, strict=True))
    assert [(stage.workers, stage.minibatches) for stage in grown.stages] == [(2, 24)] and grown.steps == 12
    for name, p in plain.parameters.items():
        assert torch.equal(grown.parameters[name], p)


@pytest.mark.parametrize("rule", RULES)
def test_workers_that_begin_with_the_same_data_change_nothing(rule: str) -> None:
    """Their displacements are those of the workers that were there, and the gain here does not follow N."""
    x, y = batches(12, 2)
    model, make = make_net(), made_for(rule)
    twice = torch.cat([x, x], 1), torch.cat([y, y], 1)
    rows = one_by_one(x[:2], y[:2]) + one_by_one(twice[0][2:], twice[1][2:])
    grown = simulate_grown(model, loss_of, make(model.parameters()), rule, rows, 4, growth=AT_ONCE, rate=lambda *_: 1.0)
    plain = simulate_stacked(model, loss_of, make(model.parameters()), rule, zip(x, y, strict=True))
    assert [stage.workers for stage in grown.stages] == [2, 4]
    for name, p in plain.parameters.items():
        torch.testing.assert_close(grown.parameters[name], p, atol=1e-6, rtol=0)


def test_the_local_rate_follows_the_workers() -> None:
    seen: list[tuple[int, int]] = []

    def rate(done: int, workers: int) -> float:
        seen.append((done, workers))
        return rate_factor(workers)

    x, y = batches(12, 1)
    results = []
    for given in (None, rate):
        model = make_net()
        optimizer = momentum_sgd(model.parameters())
        results.append(
            simulate_grown(model, loss_of, optimizer, RULES[0], one_by_one(x, y), 4, growth=AT_ONCE, rate=given)
        )
    assert seen == [(0, 2), (2, 2), (4, 4), (8, 4)]
    for name, p in results[0].parameters.items():
        assert torch.equal(results[1].parameters[name], p)


@pytest.mark.parametrize(
    "settings", [{"first": 1}, {"first": 2.0}, {"blocks": 0}, {"threshold": 0}, {"threshold": "1"}]
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RuleError, match=f"{next(iter(settings))} of a growth must be"):
        Growth(**settings)


@pytest.mark.parametrize(
    ("rule", "workers", "why"),
    [("sync", 4, "with blocks and no warmup"), ("bmuf(warmup=3)", 4, "no warmup"), ("bmuf", 1, "1 workers are fewer")],
)
def test_what_cannot_grow_is_refused(rule: str, workers: int, why: str) -> None:
    model = make_net()
    with pytest.raises(UnsupportedError, match=why):
        simulate_grown(model, loss_of, momentum_sgd(model.parameters()), rule, [], workers)

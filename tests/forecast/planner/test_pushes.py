# SPDX-License-Identifier: Apache-2.0
"""Asynchronous workers on the simulated clock: cases by hand, and a run of the real server on the same clock."""

from __future__ import annotations

import pytest

import paceline
from paceline.forecast.sim import Clock, simulate
from paceline.rules.schedule import Bounded
from paceline_plugins.forecast.planner import LogNormal
from paceline_plugins.forecast.planner.forecast import block_s
from tests.helpers import attached, follow, make_net

EVEN = LogNormal(0.1)


def test_a_bound_lies_between_lockstep_and_freedom() -> None:
    steps, workers = LogNormal(0.1, 0.5), 8
    near, far = (block_s(Bounded(staleness=s, overlap=0), steps, 0.0, workers) for s in (1, 16))
    assert 0.1 < far < 0.95 * near < near < steps.slowest(1, workers)


@pytest.mark.parametrize("rule", ["asgd(overlap=0)", "ssp(staleness=2)"])
def test_the_server_itself_takes_as_long(rule: str) -> None:
    """The same times on the same clock, with real pushes: the planner's shortcut changes nothing."""
    minibatches, clock = 40, Clock(compute=0.1, network=0.03)

    def train() -> None:
        net = make_net()
        import torch

        with attached(net, rule, lr=1e-3) as (_, _, optimizer):
            for _ in range(minibatches):
                follow(optimizer, net(torch.ones(2, 6)).sum())

    simulate(train, 3, clock=clock)
    schedule = paceline.rules.recipes.rule_from_text(rule).schedule
    assert isinstance(schedule, Bounded)
    assert clock.now / minibatches == pytest.approx(block_s(schedule, EVEN, 0.03, 3), rel=0.05)

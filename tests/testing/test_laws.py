# SPDX-License-Identifier: Apache-2.0
"""The laws as functions find what breaks them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import pytest
import torch
from torch import Tensor

import paceline
from paceline.rules.outer import Average, Nesterov
from paceline.rules.outer.base import Coefficients, State
from paceline.testing import laws as testing


def test_rules_that_keep_the_laws_pass() -> None:
    testing.check_rule("diloco(period=3)", lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    testing.check_rule("sync")


def test_an_asynchronous_rule_is_refused() -> None:
    with pytest.raises(paceline.RuleError, match="asynchronous"):
        testing.check_rule("asgd")


@dataclass(frozen=True)
class Normed(Average):
    def step(self, anchor: Tensor, merged: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        return anchor.add_(merged / merged.norm())


@dataclass(frozen=True)
class Elsewhere(Nesterov):
    def origin(self, anchor: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        return torch.add(anchor, state["momentum"], out=out)


@dataclass(frozen=True)
class Infinite(Average):
    def step(self, anchor: Tensor, merged: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        return anchor.add_(merged.abs() / 0)


@pytest.mark.parametrize(
    ("outer", "says"), [(Normed(), "element-wise"), (Elsewhere(), "does not start where"), (Infinite(), "not finite")]
)
def test_a_broken_outer_step_is_found(outer: Average | Nesterov, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        testing.check_outer(outer)


@pytest.mark.parametrize("law", [testing.one_worker_is_the_program, testing.repeat, testing.resume])
def test_a_training_that_does_not_repeat_is_found(law: object) -> None:
    rates = count(1)

    def another_each_time(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01 * next(rates))  # type: ignore[arg-type]

    with pytest.raises(AssertionError, match=r"ends with another model|different models"):
        law("averaging(period=3)", another_each_time)  # type: ignore[operator]


def test_workers_that_disagree_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_simulate", lambda program: [{"w": torch.zeros(1)}, {"w": torch.ones(1)}])
    with pytest.raises(AssertionError, match="worker 1 ends with another model"):
        testing.agree("averaging(period=3)")

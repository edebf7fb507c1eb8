# SPDX-License-Identifier: Apache-2.0
"""The rule of a program that names none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import paceline
from tests.helpers import attached


@pytest.mark.parametrize(
    ("make", "settings", "name"),
    [
        (SGD, {}, "auto"),
        (Adam, {}, "auto"),
        (SGD, {"period": 16}, "bmuf"),
        (Adam, {"period": 16}, "bmuf_adam"),
        (AdamW, {"period": 16, "overlap": 4}, "bmuf_adam"),
    ],
)
def test_it_suits_the_settings_and_the_optimizer(
    make: Callable[..., Optimizer], settings: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_RULE", raising=False)
    with attached(nn.Linear(1, 1), optimizer=make, lr=0.1, **settings) as (run, *_):
        assert run.rule.name == name


def test_several_optimizers_of_which_one_is_not_adam() -> None:
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    both = [Adam(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.1)]
    with paceline.attach(model, both, period=4) as run:
        assert run.rule.name == "bmuf"

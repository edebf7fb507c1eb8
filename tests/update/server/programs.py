# SPDX-License-Identifier: Apache-2.0
"""What the tests of asynchronous rules run in virtual workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from paceline.forecast.sim import Clock, uniform

RECIPES = [
    "asgd()",
    "asgd(overlap=0)",
    "asgd(piece=64)",
    "asgd(period=4)",
    "ssp(staleness=2)",
    "ssp(staleness=1, period=3)",
    "adadelay()",
    "adadelay(c=0.1)",
    "staleness_aware()",
    "momentum_tuned()",
    "dc_asgd()",
    "dc_asgd(kind='adaptive', limit=1.0)",
    "easgd(period=4)",
]


def uneven(seed: int = 1) -> Clock:
    """Every minibatch takes 0.5 to 1.5 s, every message 0 to 0.2 s."""
    return Clock(uniform(), lambda source, to, nbytes, generator: generator.uniform(0.0, 0.2), seed)


def simulate(target: Callable[[], Any], workers: int, clock: Clock | None = None) -> list[Any]:
    """`paceline.simulate` from a known state of the generators."""
    torch.manual_seed(5)
    return list(paceline.simulate(target, workers, clock=clock if clock is not None else uneven()))


class Numbers(nn.Module):
    """A flat parameter of `size` numbers, all alike."""

    def __init__(self, size: int = 1, value: float = 0.0) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.full((size,), value))

    @property
    def value(self) -> float:
        return float(self.p.detach()[0])


def lines(folder: Path, worker: int, kind: str) -> list[dict[str, Any]]:
    """Events of one kind in a worker's log."""
    text = (folder / f"rank-{worker:03d}.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, text) if event["kind"] == kind]


def finite(state: dict[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in state.values())

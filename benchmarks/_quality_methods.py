# SPDX-License-Identifier: Apache-2.0
"""The methods of `time_to_quality.py`, with their settings in their names, and one training of each.

    serial                  one worker, the plain loop
    cold, amplified         N workers from the first step; amplified with amplify=0.5
    grown                   amplified, with a number of workers that grows to N
    diloco, averaging       N workers from the first step; DiLoCo with its published constants (0.7, Nesterov 0.9)
    sync                    the mean gradient of k minibatches in each step, with the stages of "grown": a growing batch

Settings that differ follow: `grown-threshold=0.5-rate=0.4`. They are `rate` (the exponent of the local rate's factor
k^rate), `height` (a further factor), `threshold`, `first` and `blocks` of the growth, `amplify`, `period` and `beta1`
of the rule, and `gain` (the exponent of its gain N^gain). `law` and `tensors` are those of `_quality_trials.py`. For
sync `momentum` is that of SGD, at 1 - momentum times the rate, or Adam's beta1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from _quality_tasks import Batch, Task, start
from _quality_trials import train_trial
from torch import nn
from torch.optim import Optimizer

from paceline.forecast.sim import simulate_grown
from paceline.rules.outer.block_momentum import BlockMomentum
from paceline.rules.outer.gain import EXPONENT
from paceline.rules.recipes import rule_from_text
from paceline.rules.rule import Rule
from paceline.rules.schedule import Growth
from paceline.rules.schedule.growth import RATE_EXPONENT

AMPLIFY = {"cold": 0.0, "amplified": 0.5, "grown": 0.5}
OTHERS = {"diloco": "diloco(period={period}, gain='paper')", "averaging": "averaging(period={period})"}
KINDS = ("serial", "sync", *AMPLIFY, *OTHERS)
SETTINGS = {"height", "momentum", "rate", "threshold", "first", "blocks", "amplify", "period", "beta1", "gain"}
SETTINGS |= {"law", "tensors"}
Stages = list[list[float]]
"""Rows of workers, minibatches of all of them, how many workers they were worth, and the period where it changes."""


@dataclass(frozen=True)
class Gained(BlockMomentum):
    """Block momentum with a gain of N^exponent."""

    exponent: float = EXPONENT

    def _numbers(self, workers: int) -> tuple[float, float]:
        return super()._numbers(workers ** (self.exponent / (EXPONENT - self.amplify / 2)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        kind: its first word.
        settings: by name; only what differs.
    """

    kind: str
    settings: dict[str, float]

    @classmethod
    def of(cls, name: str) -> Method:
        """The method of a name."""
        kind, *rest = name.split("-")
        settings = dict(part.split("=") for part in rest)
        if kind not in KINDS or not settings.keys() <= SETTINGS:
            raise SystemExit(f"there is no method {name!r}; give one such as serial, grown or grown-threshold=0.5")
        return cls(kind, {setting: float(value) for setting, value in settings.items()})

    def get(self, name: str, default: float) -> float:
        """A setting."""
        return self.settings.get(name, default)

    @property
    def rate(self) -> float:
        """The exponent of the rate's factor k^rate."""
        return self.get("rate", RATE_EXPONENT)

    def rule(self, task: Task, period: float | None = None) -> Rule:
        """What workers exchange, and how; in blocks of another period if one is given."""
        if self.kind in ("serial", "sync"):
            return rule_from_text("sync")
        period = int(period or self.get("period", task.period))
        if self.kind in OTHERS:
            return rule_from_text(OTHERS[self.kind].format(period=period))
        amplify = self.get("amplify", AMPLIFY[self.kind])
        beta1 = f", beta1={self.settings['beta1']}" if "beta1" in self.settings else ""
        made = rule_from_text(f"{task.recipe}(period={period}, amplify={amplify}{beta1})")
        if "gain" not in self.settings:
            return made
        return replace(made, outer=Gained(amplify=amplify, exponent=self.settings["gain"]))

    def rate_of(self, task: Task, minibatches: int) -> Callable[[int, int], float]:
        """(minibatches so far, k) -> the factor of the rate."""
        return lambda done, k: float(k**self.rate * task.factor((done + k / 2) / minibatches))

    def growth(self, workers: int) -> Growth:
        """How the number of workers grows."""
        plain = Growth() if self.kind == "grown" else Growth(first=workers)
        first, blocks = (int(self.get(name, getattr(plain, name))) for name in ("first", "blocks"))
        return Growth(first=first, threshold=self.get("threshold", plain.threshold), blocks=blocks)


def train(
    task: Task, name: str, workers: int, minibatches: int, seed: int, folder: Path, stages: Stages
) -> dict[str, Any]:
    """Make one training; its quality and its stages. Those given are for "sync" alone."""
    method = Method.of(name)
    model, optimizer = start(task, seed)
    optimizer.param_groups[0]["lr"] *= method.get("height", 1.0)
    batches = task.batches(folder, minibatches, seed)
    if method.kind in ("serial", "sync"):
        made = stages if method.kind == "sync" else [[1, minibatches, 1.0]]
        if "momentum" in method.settings:
            _give_momentum(optimizer.param_groups[0], method.settings["momentum"])
        _together(task, model, optimizer, batches, minibatches, made, method.rate)
    elif method.settings.keys() & {"law", "tensors"}:
        law, tensors = int(method.get("law", 0)), bool(method.get("tensors", 0))
        given = (task, model, optimizer, method.rule(task), batches, workers, method.growth(workers))
        parameters, made = train_trial(*given, method.rate_of(task, minibatches), law=law, tensors=tensors)
        model.load_state_dict(parameters, strict=False)
    else:
        found = simulate_grown(
            model,
            task.loss,
            optimizer,
            method.rule(task),
            batches,
            workers,
            growth=method.growth(workers),
            rate=method.rate_of(task, minibatches),
            largest_gradient=task.largest_gradient,
        )
        model.load_state_dict(found.parameters, strict=False)
        made = [[one.workers, one.minibatches, round(one.effective, 2)] for one in found.stages]
    quality = task.judge(model, folder)
    row = {"quality": quality if math.isfinite(quality) else None, "stages": made}
    return row if task.error is None else {**row, "error": task.error(model, folder)}


def _give_momentum(group: dict[str, Any], momentum: float) -> None:
    if "betas" in group:
        group["betas"] = (momentum, group["betas"][1])
    else:
        group.update(momentum=momentum, lr=group["lr"] * (1 - momentum))


def _together(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[Batch],
    minibatches: int,
    stages: Stages,
    exponent: float,
) -> None:
    """Steps on the minibatches of k workers at once, which has the mean of their gradients."""
    group, done = optimizer.param_groups[0], 0
    rate = group["lr"]
    for workers, count, _ in stages:
        k = int(workers)
        for _ in range(int(count) // k):
            step = list(islice(batches, k))
            joined = step[0] if k == 1 else [torch.cat(column) for column in zip(*step, strict=True)]
            group["lr"] = rate * k**exponent * task.factor((done + k / 2) / minibatches)
            optimizer.zero_grad()
            task.loss(model, *joined).backward()
            if task.largest_gradient is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), task.largest_gradient)
            optimizer.step()
            done += k

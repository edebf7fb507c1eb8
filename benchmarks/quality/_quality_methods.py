# SPDX-License-Identifier: Apache-2.0
"""The methods of `time_to_quality.py`, with their settings in their names, and one training of each.

    serial                  one worker, the plain loop
    cold, amplified         N workers from the first step; amplified with amplify=0.5
    grown                   amplified, with a number of workers that grows to N
    diloco, averaging       N workers from the first step; DiLoCo with its published constants (0.7, Nesterov 0.9)
    uncompensated           blocks of Adam whose moments are averaged and not compensated
    sync                    the mean gradient of k minibatches in each step, with the stages of "grown": a growing batch
    asgd, dcasgd            gradients of older models, applied one by one at one worker's rate; delays compensated

Settings that differ follow: `grown-threshold=0.5-rate=0.4`. They are `rate` (the exponent of the local rate's factor
k^rate), `height` (a further factor), `threshold`, `first` and `blocks` of the growth, `amplify`, `period` and `beta1`
of the rule, and `gain` (the exponent of its gain N^gain). For sync `momentum` is that of SGD, at 1 - momentum times the
rate, or Adam's beta1. With a `ramp` sync has N workers from the first step, and its rate rises from one worker's over
this share of the samples. `start` is the share on which one worker trains before all do. For Adam `beta1` is that of
all workers, so that blocks do not lower it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from _quality_asgd import StaleWorkers
from _quality_tasks import Batch, Task, start
from torch import nn
from torch.optim import Optimizer

from paceline.forecast.sim.clock import Clock, exponential
from paceline.rules.outer.block_momentum import BlockMomentum
from paceline.rules.outer.gain import EXPONENT
from paceline.rules.recipes import rule_from_text
from paceline.rules.rule import Rule
from paceline.rules.schedule import Growth
from paceline.rules.schedule.growth import RATE_EXPONENT
from paceline_plugins.forecast import simulate_grown

AMPLIFY = {"cold": 0.0, "amplified": 0.5, "grown": 0.5}
OTHERS = {
    "diloco": "diloco(period={period}, gain='paper')",
    "averaging": "averaging(period={period})",
    "uncompensated": "bmuf_adam(period={period}, local_state='average'{beta1})",
}
LATE = {"asgd": "asgd(overlap=0)", "dcasgd": "dc_asgd(kind='adaptive', strength=2.0, limit=1.0, overlap=0)"}
EACH_STEP = {"serial": "sync", "sync": "sync", **LATE}
KINDS = (*EACH_STEP, *AMPLIFY, *OTHERS)
SETTINGS = {"height", "momentum", "rate", "threshold", "first", "blocks", "amplify", "period", "beta1", "gain"}
SETTINGS |= {"start", "ramp"}
Stages = list[list[float]]
"""Rows of workers, minibatches of all of them, and how many workers they were worth."""


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
        return self.get("rate", 0.0 if self.kind in LATE else RATE_EXPONENT)

    @property
    def follows(self) -> bool:
        """Whether it takes the stages of "grown"."""
        return self.kind == "sync" and "ramp" not in self.settings

    def rule(self, task: Task) -> Rule:
        """What workers exchange, and how."""
        if self.kind in EACH_STEP:
            return rule_from_text(EACH_STEP[self.kind])
        period = int(self.get("period", task.period))
        beta1 = f", beta1={self.settings['beta1']}" if "beta1" in self.settings else ""
        if self.kind in OTHERS:
            return rule_from_text(OTHERS[self.kind].format(period=period, beta1=beta1))
        amplify = self.get("amplify", AMPLIFY[self.kind])
        made = rule_from_text(f"{task.recipe}(period={period}, amplify={amplify}{beta1})")
        if "gain" not in self.settings:
            return made
        return replace(made, outer=Gained(amplify=amplify, exponent=self.settings["gain"]))

    def growth(self, workers: int) -> Growth:
        """How the number of workers grows."""
        plain = Growth() if self.kind == "grown" else Growth(first=workers)
        first, blocks = (int(self.get(name, getattr(plain, name))) for name in ("first", "blocks"))
        return Growth(first=first, threshold=self.get("threshold", plain.threshold), blocks=blocks)


def train(
    task: Task, name: str, workers: int, minibatches: int, seed: int, folder: Path, stages: Stages
) -> dict[str, Any]:
    """Make one training; its quality and its stages. Those given are for "sync" without a ramp alone."""
    method = Method.of(name)
    model, optimizer = start(task, seed)
    optimizer.param_groups[0]["lr"] *= method.get("height", 1.0)
    for setting in ("beta1", "momentum"):
        if setting in method.settings:
            _give_momentum(optimizer.param_groups[0], method.settings[setting])
    training = _Training(task, method, model, optimizer, task.batches(folder, minibatches, seed), minibatches)
    if method.kind in ("serial", "sync"):
        made = training.together(stages if method.follows else [[workers, minibatches, float(workers)]])
    elif method.kind in LATE:
        made = training.late(workers, seed)
    else:
        made = training.blocks(workers)
    quality = task.judge(model, folder)
    row = {"quality": quality if math.isfinite(quality) else None, "stages": made}
    return row if task.error is None else {**row, "error": task.error(model, folder)}


def _give_momentum(group: dict[str, Any], momentum: float) -> None:
    if "betas" in group:
        group["betas"] = (momentum, group["betas"][1])
    else:
        group.update(momentum=momentum, lr=group["lr"] * (1 - momentum))


@dataclass
class _Training:
    """One training, which leaves its model in `model`; each way returns its stages."""

    task: Task
    method: Method
    model: nn.Module
    optimizer: Optimizer
    batches: Iterator[Batch]
    minibatches: int
    done: int = 0

    def factor(self, done: int, k: int) -> float:
        """Of the rate, in a step of k workers after so many minibatches of this way."""
        share = (self.done + done + k / 2) / self.minibatches
        ramp, rise = self.method.get("ramp", 0.0), k**self.method.rate
        if share < ramp:
            rise = 1 + (rise - 1) * share / ramp
        return float(rise * self.task.factor(share))

    def together(self, stages: Stages) -> Stages:
        """Steps on the minibatches of k workers at once, which has the mean of their gradients."""
        group = self.optimizer.param_groups[0]
        rate, made = group["lr"], 0
        for workers, count, _ in stages:
            k = int(workers)
            for _ in range(int(count) // k):
                group["lr"] = rate * self.factor(made, k)
                self._step(list(islice(self.batches, k)))
                made += k
        group["lr"] = rate
        return stages

    def _step(self, step: list[Batch]) -> None:
        joined = step[0] if len(step) == 1 else [torch.cat(column) for column in zip(*step, strict=True)]
        self.optimizer.zero_grad()
        self.task.loss(self.model, *joined).backward()
        if self.task.largest_gradient is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.largest_gradient)
        self.optimizer.step()

    def late(self, workers: int, seed: int) -> Stages:
        """Gradients of older models, at one worker's rate."""
        if self.task.moments:
            raise SystemExit(f"{self.task.name} is trained with Adam; asgd is made for SGD here")
        rate = self.optimizer.param_groups[0]["lr"]
        group = StaleWorkers(self.model, self.task.loss, workers, self.method.rule(self.task).outer)
        clock, largest = Clock(exponential(), seed=seed), self.task.largest_gradient
        group.train(self.batches, lambda done: rate * self.factor(done, workers), clock, largest)
        return [[workers, self.minibatches, float(workers)]]

    def blocks(self, workers: int) -> Stages:
        """Blocks, with one worker's plain training before them where the method starts so."""
        first = int(self.method.get("start", 0.0) * self.minibatches)
        before = self.together([[1, first, 1.0]]) if first else []
        self.done = first
        found = simulate_grown(
            self.model,
            self.task.loss,
            self.optimizer,
            self.method.rule(self.task),
            self.batches,
            workers,
            growth=self.method.growth(workers),
            rate=self.factor,
            largest_gradient=self.task.largest_gradient,
        )
        self.model.load_state_dict(found.parameters, strict=False)
        return [*before, *([one.workers, one.minibatches, round(one.effective, 2)] for one in found.stages)]

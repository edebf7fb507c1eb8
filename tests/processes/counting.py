# SPDX-License-Identifier: Apache-2.0
"""A training program whose model counts: what entered the model of which sample can be read off its parameters.

    python counting.py PHASE.json          (under `paceline run`, torchrun or :class:`tests.processes.forked.Forked`)

Under asynchronous rules the parameters are one piece of 64 numbers, so that a push is applied whole or not at all. They
hold a fingerprint: a 1 and 63 pseudo-random whole numbers of each sample, summed exactly in float64. Two multisets of
samples have the same sum only if 64 sums agree by chance. Under rules by which workers go on evenly there is one
number for each sample, and under block momentum, which trains a sample into the model little by little, such numbers
are in a buffer, which is averaged without momentum.

Each worker says with what its model ended: {"rank", "steps", "samples", and what :meth:`Counting.verdict` says}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.rules.outer import Sum

PRINTS = 64


@dataclass
class Phase:
    """One launch of the program.

    Attributes:
        rule: of the run.
        samples, batch, epochs: of the training.
        pauses: seconds that each rank takes for a minibatch; the last for all further ranks.
        loaders: loader processes of each worker.
        kills: rank -> [minibatch, "before" or "after" the optimizer's step], where it gets SIGKILL.
        resume, save: checkpoints; empty for none.
        every: minibatches between two saves; 0 for one save at `stop`.
        stop: minibatches of each worker after which the program ends; 0 for the end of all epochs.
        timeout: seconds.
    """

    rule: str
    samples: int = 500
    batch: int = 4
    epochs: int = 2
    pauses: list[float] = field(default_factory=lambda: [0.0])
    loaders: int = 0
    kills: dict[str, list[Any]] = field(default_factory=dict)
    resume: str = ""
    save: str = ""
    every: int = 0
    stop: int = 0
    timeout: float = 60.0

    @property
    def momentum(self) -> bool:
        """Whether a sample comes into the parameters little by little."""
        return self.rule.startswith("bmuf") and "momentum=0" not in self.rule

    @property
    def evenly(self) -> bool:
        """Whether workers go on evenly."""
        return self.rule.startswith(("sync", "bmuf"))


class Count(nn.Module):
    """Parameters that count, and a buffer that is averaged as running statistics are."""

    averages_buffers = True

    def __init__(self, numbers: int, entered: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numbers, dtype=torch.float64))
        self.register_buffer("entered", torch.zeros(entered, dtype=torch.float64))


def fingerprints(ids: Tensor) -> Tensor:
    """(64,): the sum over some samples of a 1 and 63 pseudo-random whole numbers below 2^20."""
    x = ids[:, None] * PRINTS + torch.arange(PRINTS)
    for factor in (-7046029254386353131, -4658895280553007687):  # two rounds of splitmix64's finaliser
        x = (x ^ (x >> 29 & (1 << 35) - 1)) * factor
    prints = (x >> 40 & (1 << 20) - 1).double()
    prints[:, 0] = 1
    return prints.sum(0)


def one_each(ids: Tensor, samples: int) -> Tensor:
    """(samples,): how often each is among them."""
    return torch.bincount(ids, minlength=samples).double()


class Counting:
    """The program."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.model = Count(phase.samples if phase.evenly else PRINTS, phase.samples if phase.momentum else 0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        rule = paceline.rule_from_text(phase.rule)
        if phase.rule.startswith("ssp"):  # which takes a share of a push that depends on how many workers live
            rule = replace(rule, outer=Sum())
        self.run = paceline.attach(self.model, self.optimizer, rule, timeout_s=phase.timeout)
        self.rank, self.size = self.run.world.rank, self.run.world.size
        self.pause = phase.pauses[min(self.rank, len(phase.pauses) - 1)]
        self.kill = phase.kills.get(str(self.rank), [0, ""])
        self.steps = 0

    def __call__(self) -> dict[str, Any] | None:
        """Train; what the model ended with, or None where the phase stops before the end."""
        phase = self.phase
        if phase.resume:
            self.run.resume(phase.resume)
        data = TensorDataset(torch.arange(phase.samples))
        share = self.run.share(DataLoader(data, phase.batch, shuffle=True, num_workers=phase.loaders))
        for _ in range(self.run.epoch, phase.epochs):
            for (ids,) in share:
                self.step(ids)
                if phase.save and self.steps == phase.stop:
                    self.run.save(phase.save)
                    self.run.abandon()
                    return None
                if phase.every and self.steps % phase.every == 0:
                    self.run.save(phase.save)
        self.run.close()
        return {"rank": self.rank, "steps": self.steps, "samples": self.run.samples, **self.verdict()}

    def step(self, ids: Tensor) -> None:
        """One minibatch."""
        time.sleep(self.pause)  # stands for the work of a device
        self.steps += 1
        self.optimizer.zero_grad()
        (-(self.model.weight * self.gradient(ids)).sum()).backward()
        self.die_at("before")
        if self.phase.momentum:
            self.model.entered += self.size * one_each(ids, self.phase.samples)
        self.optimizer.step()
        self.die_at("after")

    def gradient(self, ids: Tensor) -> Tensor:
        """What the workers' exchange makes a plain sum of."""
        if not self.phase.evenly:
            return fingerprints(ids)
        counts = one_each(ids, self.phase.samples)
        if not self.phase.rule.startswith("sync"):
            return counts * self.size  # the mean of as many minibatches of each worker
        together = torch.tensor(float(len(ids)))
        dist.all_reduce(together)
        return counts * (together / len(ids))  # workers are weighted with the samples that they have

    def die_at(self, when: str) -> None:
        """SIGKILL, at a place of the program and not at a time."""
        if self.kill == [self.steps, when]:
            os.kill(os.getpid(), signal.SIGKILL)

    def verdict(self) -> dict[str, Any]:
        """What is not as every sample of every epoch, once, would have made it.

        `wrong`: numbers of the model; `excess`: samples too many in it, repeated less lost.
        """
        phase = self.phase
        found = self.model.entered if phase.momentum else self.model.weight.detach()
        expected = torch.full((phase.samples,), float(phase.epochs), dtype=torch.float64)
        if not phase.evenly:
            expected = fingerprints(torch.arange(phase.samples)) * phase.epochs
        error = found - expected
        excess = float(error.sum() if phase.evenly else error[0])
        return {"wrong": int(error.abs().gt(1e-6).sum()), "excess": round(excess)}  # means are rounded


def main(path: Path) -> None:
    """Carry out a phase."""
    torch.set_num_threads(1)
    said = Counting(Phase(**json.loads(path.read_text())))()
    if said is not None:
        print("ENDED", json.dumps(said), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

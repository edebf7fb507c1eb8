# SPDX-License-Identifier: Apache-2.0
"""A training program for elastic runs, whose model tells which samples went into it, exchange by exchange.

    python -m tests.flow.program PHASE.json       (with PACELINE_CONTROL in the environment)

Buffers are averaged, weighted with the minibatches m_i of each worker. What a worker writes into them during a block is

    entered   what they were + n_i / m_i     n_i: how often each sample was in its minibatches of this block
    slots     what they were + 1 / m_i       at this worker's own place

so that an exchange adds sum(n_i) / M to the first and 1 / M to the places of all who took part, with M = sum(m_i), and
the exact counts can be read off. Every worker writes down what each exchange added; any of these books will do, because
all hold the same model.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.flow import joining

SLOTS = 256


@dataclass
class Phase:
    """One launch.

    Attributes:
        rule: of the run.
        samples, batch, epochs: of the training.
        pause: seconds that a minibatch takes.
        kills: worker -> [minibatch, "before" or "after" the optimizer's step], where it gets SIGKILL.
        terms_at: the same with SIGTERM, "twice" for two of them; or [number, "exchange"], before it is committed.
        terms_joining: whether workers that join get SIGTERM before they receive the state.
        checkpoint: directory of steps; "" for none.
        nans: worker -> minibatch in which its model becomes nan.
        jumps: worker -> minibatch in which its model goes far away.
        stops: worker -> minibatch before which it gets SIGSTOP.
        slow: worker -> seconds that its minibatches take.
        tunes: worker -> [minibatch, settings]: what it asks for then.
        hold: after so many minibatches wait until the file `go` is there; 0 for never.
        tune: settings that the first worker asks to change, at each of its minibatches.
        books: directory of what the exchanges added.
        timeout: seconds.
        width: of the model.
        frozen: bytes of a frozen tensor in it.
        apart: whether each worker makes other values for it.
    """

    books: str
    rule: str = "bmuf(period=4)"
    samples: int = 400
    batch: int = 4
    epochs: int = 2
    pause: float = 0.0
    kills: dict[str, list[Any]] = field(default_factory=dict)
    terms_at: dict[str, list[Any]] = field(default_factory=dict)
    terms_joining: bool = False
    checkpoint: str = ""
    nans: dict[str, int] = field(default_factory=dict)
    jumps: dict[str, int] = field(default_factory=dict)
    stops: dict[str, int] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    tunes: dict[str, list[Any]] = field(default_factory=dict)
    hold: int = 0
    tune: dict[str, float] = field(default_factory=dict)
    timeout: float = 30.0
    seed: int = 0
    width: int = 16
    frozen: int = 0
    apart: bool = False


class Model(nn.Module):
    """A small network, and the buffers that count, which are averaged as running statistics are."""

    averages_buffers = True
    entered: Tensor
    slots: Tensor

    def __init__(self, samples: int, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))
        self.register_buffer("entered", torch.zeros(samples, dtype=torch.float64))
        self.register_buffer("slots", torch.zeros(SLOTS, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) -> (batch, 1)."""
        found: Tensor = self.net(x)
        return found


def task(samples: int) -> tuple[Tensor, Tensor]:
    """Inputs (samples, 8) and what is to be learnt of them (samples, 1)."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 8, generator=generator)
    return x, torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(samples, 1, generator=generator)


class Program:
    """The program."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        torch.manual_seed(phase.seed)
        self.model = Model(phase.samples, phase.width)
        if phase.frozen:
            values = torch.full((phase.frozen // 4,), float(os.getpid() if phase.apart else 1))
            self.model.frozen = self.model.second_name = nn.Parameter(values, requires_grad=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.8 / phase.width, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + 0.001 * step))
        if phase.terms_joining:
            terminate_before(joining, "receive_state")
        kept = {"checkpoint": phase.checkpoint, "every_blocks": 1000} if phase.checkpoint else {}
        self.run = paceline.attach(self.model, self.optimizer, phase.rule, timeout_s=phase.timeout, **kept)
        self.run.include(scheduler=self.scheduler)
        if phase.checkpoint:
            self.run.resume()
        self.live = live = self.run._parts.membership
        self.worker = live.control.worker if live is not None else self.run.world.rank
        self.steps, self.block = 0, self.run.blocks
        self.counts = torch.zeros(phase.samples, dtype=torch.float64)
        self.made = 0
        self.rates: list[float] = []  # factors of its steps, each as long as it stayed
        self.start = self.snapshot()
        self.book = Path(phase.books) / f"worker-{self.worker:03d}.jsonl"
        self.trained = os.open(Path(phase.books) / "trained", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def snapshot(self) -> tuple[Tensor, Tensor]:
        """The counting buffers as they are."""
        return self.model.entered.clone(), self.model.slots.clone()

    def __call__(self) -> dict[str, Any]:
        """Train to the end."""
        phase = self.phase
        x, y = task(phase.samples)
        data = TensorDataset(torch.arange(phase.samples), x, y)
        share = self.run.share(DataLoader(data, phase.batch, shuffle=True))
        try:
            for _ in range(self.run.epoch, phase.epochs):
                for ids, x, y in share:
                    self.look()
                    self.step(ids, x, y)
                self.look()
            self.run.close()
        finally:  # also when it leaves before the end
            self.look()
        ended = {"worker": self.worker, "steps": self.steps, "state": digest(self.model)}
        tuned = self.run._context.tuner.tunables.state()["factors"]
        ended["rates"] = self.rates
        return {**ended, "period": getattr(self.run.rule.schedule, "period", None), "tuned": tuned}

    def look(self) -> None:
        """Write down what exchanges have added since the last look."""
        if self.run.blocks == self.block:
            return
        first, self.block = self.block + 1, self.run.blocks
        before, self.start = self.start, self.snapshot()
        entered, slots = self.start[0] - before[0], self.start[1] - before[1]
        with self.book.open("a") as book:
            said = {"first": first, "last": self.block, "entered": sparse(entered), "slots": sparse(slots)}
            book.write(json.dumps(said) + "\n")
        self.counts.zero_()
        self.made = 0

    def step(self, ids: Tensor, x: Tensor, y: Tensor) -> None:
        """One minibatch."""
        time.sleep(self.phase.slow.get(str(self.worker), self.phase.pause))  # stands for the work of a device
        self.steps += 1
        rate = self.run._context.tuner.tunables.rates.common
        self.rates += [rate] if rate not in self.rates[-1:] else []
        asked = self.phase.tunes.get(str(self.worker))
        if asked is not None and asked[0] == self.steps:
            self.run.tune(**asked[1])
        if self.steps == self.phase.hold:
            while not (Path(self.phase.books) / "go").exists():
                time.sleep(0.01)
        if self.phase.stops.get(str(self.worker)) == self.steps:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(x), y).backward()
        self.made += 1
        self.counts += torch.bincount(ids, minlength=self.phase.samples)
        with torch.no_grad():
            self.model.entered.copy_(self.start[0] + self.counts / self.made)
            self.model.slots.copy_(self.start[1])
            self.model.slots[self.worker % SLOTS] += 1 / self.made
            if self.phase.nans.get(str(self.worker)) == self.steps:
                next(self.model.net.parameters()).fill_(float("nan"))
            if self.phase.jumps.get(str(self.worker)) == self.steps:
                next(self.model.net.parameters()).add_(1000.0)
        self.die_at("before")
        place = phase_of(self.phase.terms_at, self.worker)
        if place == [self.run.blocks + 1, "exchange"] and self.live is not None:
            del self.phase.terms_at[str(self.worker)]
            terminate_before(self.live.control, "commit")
        if self.phase.tune and self.run.world.rank == 0:
            self.run.tune(**self.phase.tune)
        self.optimizer.step()
        self.scheduler.step()
        self.die_at("after")
        self.look()
        os.write(self.trained, "".join(f"{sample}\n" for sample in ids.tolist()).encode())

    def die_at(self, when: str) -> None:
        """A signal, at a place of the program and not at a time."""
        for number, places in ((signal.SIGKILL, self.phase.kills), (signal.SIGTERM, self.phase.terms_at)):
            if phase_of(places, self.worker) == [self.steps, when]:
                os.kill(os.getpid(), number)
        if when == "after" and phase_of(self.phase.terms_at, self.worker) == [self.steps, "twice"]:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)


def phase_of(places: dict[str, list[Any]], worker: int) -> list[Any] | None:
    """Where something happens to a worker."""
    return places.get(str(worker))


def terminate_before(place: Any, name: str) -> None:
    """The next call of a function begins with SIGTERM."""
    before = getattr(place, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        setattr(place, name, before)
        os.kill(os.getpid(), signal.SIGTERM)
        return before(*args, **kwargs)

    setattr(place, name, call)


def sparse(x: Tensor) -> dict[str, float]:
    """The entries that are not 0."""
    return {str(int(k)): float(x[k]) for k in x.abs().gt(1e-12).nonzero().flatten()}


def digest(model: nn.Module) -> str:
    """The bits of a model's parameters and buffers."""
    import hashlib

    whole = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole.update(tensor.contiguous().numpy().tobytes())
    return whole.hexdigest()


def counted(books: Path, samples: int) -> Tensor:
    """How often each sample is in the model, from the books of all workers, shape (samples,).

    A worker that waited may have come to several exchanges between two looks; another has looked in between.
    """
    rows: dict[int, dict[str, Any]] = {}
    last = 0
    for book in sorted(books.glob("worker-*.jsonl")):
        for line in book.read_text().splitlines():
            row = json.loads(line)
            last = max(last, row["last"])
            if row["first"] == row["last"]:
                rows.setdefault(row["last"], row)
    missing = sorted(set(range(1, last + 1)) - rows.keys())
    assert not missing, f"nobody has written down exchange {missing}"
    total = torch.zeros(samples, dtype=torch.float64)
    for row in rows.values():
        shares = list(row["slots"].values())
        if not shares:
            assert not row["entered"], row
            continue
        assert max(shares) - min(shares) < 1e-9 * max(shares), ("more than one exchange in a row", row)
        for place, share in row["entered"].items():
            total[int(place)] += share / shares[0]
    return total


def main(path: Path) -> None:
    """Carry out a phase."""
    torch.set_num_threads(1)
    print("ENDED", json.dumps(Program(Phase(**json.loads(path.read_text())))()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

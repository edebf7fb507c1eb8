# SPDX-License-Identifier: Apache-2.0
"""One training of the speech table: a method, a number of workers, a rate and a seed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _reading import CHUNK, curve, error_rate, large_minibatches, make_step, stacked
from _speech import Minibatches, Utterances, kept, minibatches, noisy, to_text
from _speech_reader import Listener, loss_of, read
from torch import Tensor, nn

import paceline
from paceline.errors import NonFiniteError

TRAINING, TUNING, FINAL = 12_288, 512, 1_024  # utterances
SHOWN = 8  # held-out utterances whose reading is kept


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        name: as the table has it.
        rule: its text; `{period}` stands for tau, `{bmuf}` for BMUF as it suits the local optimizer, `{keep}` for
            leaving Adam's beta1 at 0.9.
        scaling: the local rate is that of one worker times N to this power.
    """

    name: str
    rule: str
    scaling: float = 0.0


SERIAL = Method("serial", "sync")
TOGETHER = (
    Method("sync, rate as serial", "sync"),
    Method("sync, rate times N", "sync", scaling=1.0),
    Method("averaging", "averaging(period={period})"),
    Method("bmuf paper gain", "{bmuf}(period={period}, gain='paper'{keep})"),
    Method("bmuf, beta1 kept", "{bmuf}(period={period}{keep})"),
    Method("bmuf", "{bmuf}(period={period})"),
    Method("diloco paper", "diloco(period={period}, gain='paper')"),
    Method("asgd", "asgd"),
)
METHODS = {method.name: method for method in (SERIAL, *TOGETHER)}


def with_gain(name: str, gain: float) -> Method:
    """Ours with a gain of its own, for the study of gains."""
    return Method(name, f"{{bmuf}}(period={{period}}, gain={gain!r})")


@dataclass(frozen=True)
class Size:
    """How large the trainings are: minibatches in all, utterances in one and in all, tau, the model, the optimizer."""

    minibatches: int
    batch: int
    period: int
    utterances: int = TRAINING
    hidden: int = 64
    layers: int = 1
    optimizer: str = "adam"

    def rule(self, method: Method) -> str:
        """A method's."""
        adam = self.optimizer == "adam"
        words = {"bmuf": "bmuf_adam", "keep": ", beta1=None"} if adam else {"bmuf": "bmuf", "keep": ""}
        return method.rule.format(period=self.period, **words)

    def training(self, folder: Path) -> Utterances:
        """What is heard in training."""
        return kept(folder, "training", self.utterances, held_out=False)


@dataclass(frozen=True)
class Training:
    """What is trained; `rate` is one worker's, before scaling."""

    method: Method
    workers: int
    rate: float

    @property
    def name(self) -> str:
        """For a file."""
        return f"{self.method.name}_{self.workers}_{self.rate:g}".replace(" ", "-").replace(",", "")

    @property
    def local_rate(self) -> float:
        """Of each worker, at its height."""
        return self.rate * float(self.workers**self.method.scaling)


def start(training: Training, size: Size, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, the same for all methods, and its optimizer."""
    torch.manual_seed(seed)
    model = Listener(size.hidden, size.layers)
    if size.optimizer == "adam":
        return model, torch.optim.Adam(model.parameters(), lr=training.local_rate)
    momentum = 0.9 if size.optimizer == "momentum" else 0.0
    return model, torch.optim.SGD(model.parameters(), lr=training.local_rate, momentum=momentum)


def train(training: Training, size: Size, seed: int, folder: Path) -> dict[str, Any]:
    """Train, and read held-out utterances; what came out, for a file."""
    said, rule = size.training(folder), size.rule(training.method)
    given = minibatches(said, size.minibatches, size.batch, training.workers, seed)
    make, steps = partial(start, training, size, seed), size.minibatches // training.workers
    began = time.process_time()
    row: dict[str, Any] = {"method": training.method.name, "workers": training.workers, "seed": seed}
    row |= {"rate": training.rate, "local_rate": training.local_rate, "rule": rule}
    try:
        if rule == "asgd":
            model, losses = virtual(make, rule, given, steps, training.workers)
        else:
            model, optimizer = make()
            if rule == "sync":
                losses = large_minibatches(loss_of, model, optimizer, given, steps)
            else:
                losses = stacked(loss_of, model, optimizer, rule, given, steps)
    except NonFiniteError as error:
        return row | {"diverged": str(error), "error": 1.0, "word_error": 1.0, "tuning_error": 1.0}
    seconds = time.process_time() - began
    row |= {"seconds": seconds, "minibatch_ms": 1e3 * seconds / size.minibatches, "curve": curve(losses)}
    return row | judged(model, folder)


class _Shared:
    """Steps of N workers of which one runs at a time: each is made once, and held until all have had it."""

    def __init__(self, given: Iterable[Minibatches], workers: int) -> None:
        self._given, self._workers = iter(given), workers
        self._held: dict[int, tuple[Minibatches, set[int]]] = {}
        self._made = 0

    def of(self, rank: int, steps: int) -> Iterator[list[Tensor]]:
        """A worker's minibatches."""
        for step in range(steps):
            while self._made <= step:
                self._held[self._made] = (next(self._given), set())
                self._made += 1
            batch, had = self._held[step]
            had.add(rank)
            if len(had) == self._workers:
                del self._held[step]
            yield [tensor[rank] for tensor in batch]


def virtual(
    make: partial[tuple[nn.Module, torch.optim.Optimizer]],
    rule: str,
    given: Iterable[Minibatches],
    steps: int,
    workers: int,
) -> tuple[nn.Module, Tensor]:
    """N virtual workers under any rule; at steady paces, they take turns."""
    shared = _Shared(given, workers)

    def program() -> tuple[nn.Module, Tensor]:
        model, optimizer = make()
        with paceline.attach(model, optimizer, rule, guard=None) as run:
            losses = [
                make_step(loss_of, model, optimizer, batch, step, steps)
                for step, batch in enumerate(shared.of(run.world.rank, steps))
            ]
        return run.model_for_export(), torch.stack(losses)

    outs = [out for out in paceline.simulate(program, workers) if out is not None]
    return outs[0][0], torch.stack([losses for _, losses in outs]).mean(0)


def held_out(folder: Path) -> tuple[Utterances, Tensor]:
    """Utterances in other manners, and as they are heard; the first TUNING choose the rate, the rest is judged."""
    said = kept(folder, "held-out", TUNING + FINAL, held_out=True)
    return said, noisy(said.powers, said.noises, torch.Generator().manual_seed(0))


def judged(model: nn.Module, folder: Path) -> dict[str, Any]:
    """Letter and word error rates, and how the first of the judged utterances were read."""
    said, heard = held_out(folder)
    with torch.no_grad():
        parts = zip(heard.split(256), said.times.split(256), strict=True)
        readings = [found for part, times in parts for found in read(model, part, times)]
    letters = [row[:length].tolist() for row, length in zip(said.numbers, said.lengths, strict=True)]
    found_words = [to_text(found).split() for found in readings]
    true_words = [to_text(truth).split() for truth in letters]
    return {
        "tuning_error": error_rate(readings[:TUNING], letters[:TUNING]),
        "error": error_rate(readings[TUNING:], letters[TUNING:]),
        "word_error": error_rate(*_numbered(found_words[TUNING:], true_words[TUNING:])),
        "read": [to_text(found) for found in readings[TUNING : TUNING + SHOWN]],
    }


def _numbered(*readings: list[list[str]]) -> list[list[list[int]]]:
    """Words as numbers."""
    numbers: dict[str, int] = {}
    return [[[numbers.setdefault(word, len(numbers)) for word in line] for line in lines] for lines in readings]


def check(size: Size, folder: Path, workers: int = 4) -> float:
    """The largest difference between parameters of stacked and of virtual workers, over three blocks."""
    training, steps = Training(METHODS["bmuf"], workers, 1e-3), 3 * size.period
    rule, make = size.rule(training.method), partial(start, training, size, 0)
    every = minibatches(size.training(folder), -(-steps * workers // CHUNK) * CHUNK, size.batch, workers, 0)
    batches = [batch for _, batch in zip(range(steps), every, strict=False)]
    one, optimizer = make()
    stacked(loss_of, one, optimizer, rule, batches, steps)
    other, _ = virtual(make, rule, batches, steps, workers)
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)

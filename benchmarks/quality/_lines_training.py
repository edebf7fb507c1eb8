# SPDX-License-Identifier: Apache-2.0
"""One training of the BMUF-Adam table: a method, a number of workers, a rate and a seed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _lines import Lines, dirty, kept, minibatches, to_text
from _lines_reader import Reader, loss_of, read
from _reading import CHUNK, LARGEST_GRADIENT, curve, error_rate, large_minibatches, stacked
from torch import Tensor, nn

import paceline
from paceline.errors import NonFiniteError
from paceline_plugins.forecast import simulate_stacked

TRAINING_LINES, TUNING_LINES, FINAL_LINES = 65_536, 1_024, 2_048
SHOWN = 24  # held-out lines whose reading is kept


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        name: as the table has it.
        rule: for `simulate_stacked`; `{period}` stands for tau.
        beta1: Adam's.
        scaling: the local rate is that of one worker times N to this power.
    """

    name: str
    rule: str
    beta1: float = 0.9
    scaling: float = 0.0


def _blocks(name: str, state: str, beta1: float) -> list[Method]:
    rule = "bmuf_adam(period={period}, local_state='%s', gain='%s', beta1=None)"
    return [Method(f"{name}, gain {gain}", rule % (state, gain), beta1) for gain in ("paper", "auto")]


SERIAL = Method("serial", "sync")
SMALL_SERIAL = Method("serial, beta1 .5", "sync", 0.5)
SYNC = (
    Method("sync, rate as serial", "sync"),
    Method("sync, rate times root N", "sync", scaling=0.5),
    Method("sync, rate times N", "sync", scaling=1.0),
)
BLOCKS = (
    *_blocks("moments averaged", "average", 0.9),
    *_blocks("compensated", "compensate", 0.9),
    *_blocks("compensated, beta1 .5", "compensate", 0.5),  # the library's default at a beta1 of 0.9, too
)
METHODS = {method.name: method for method in (SERIAL, SMALL_SERIAL, *SYNC, *BLOCKS)}


def with_gain(name: str, gain: float) -> Method:
    """Ours with a gain of its own, for the study of gains."""
    return Method(name, f"bmuf_adam(period={{period}}, gain={gain!r})")


@dataclass(frozen=True)
class Size:
    """How large the trainings are: minibatches in all, lines in one, tau."""

    minibatches: int
    batch: int
    period: int

    def training(self, folder: Path) -> Lines:
        """The lines to train on; a training that reads fewer lines needs no more."""
        return kept(folder, "training", min(TRAINING_LINES, self.minibatches * self.batch), held_out=False)


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


def start(training: Training, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, the same for all methods, and its optimizer."""
    torch.manual_seed(seed)
    model = Reader()
    rate = training.rate * training.workers**training.method.scaling
    return model, torch.optim.Adam(model.parameters(), lr=rate, betas=(training.method.beta1, 0.999), fused=True)


def train(training: Training, size: Size, seed: int, folder: Path) -> dict[str, Any]:
    """Train, and read held-out lines; what came out, for a file."""
    lines = size.training(folder)
    model, optimizer = start(training, seed)
    steps = size.minibatches // training.workers
    rule = training.method.rule.format(period=size.period)
    began = time.process_time()
    row: dict[str, Any] = {"method": training.method.name, "workers": training.workers, "seed": seed}
    row |= {"rate": training.rate, "local_rate": optimizer.param_groups[0]["lr"], "rule": rule}
    try:
        given = minibatches(lines, size.minibatches, size.batch, training.workers, seed)
        if training.method.rule == "sync":
            losses = large_minibatches(loss_of, model, optimizer, given, steps)
        else:
            losses = stacked(loss_of, model, optimizer, rule, given, steps)
    except NonFiniteError as error:
        return row | {"diverged": str(error), "error": 1.0, "tuning_error": 1.0}
    seconds = time.process_time() - began
    row |= {"seconds": seconds, "minibatch_ms": 1e3 * seconds / size.minibatches, "curve": curve(losses)}
    return row | judged(model, folder)


def held_out(folder: Path) -> tuple[Lines, Tensor]:
    """Lines of other modules, and dirty pictures; the first TUNING_LINES choose the rate, the rest is judged."""
    lines = kept(folder, "held-out", TUNING_LINES + FINAL_LINES, held_out=True)
    return lines, dirty(lines.pictures, torch.Generator().manual_seed(0))


def judged(model: nn.Module, folder: Path) -> dict[str, Any]:
    """Character error rates, and how the first of the judged lines were read."""
    lines, pictures = held_out(folder)
    readings = [text for part in pictures.split(256) for text in read(model, part)]
    truths = [row[:length].tolist() for row, length in zip(lines.numbers, lines.lengths, strict=True)]
    return {
        "tuning_error": error_rate(readings[:TUNING_LINES], truths[:TUNING_LINES]),
        "error": error_rate(readings[TUNING_LINES:], truths[TUNING_LINES:]),
        "read": [to_text(found) for found in readings[TUNING_LINES : TUNING_LINES + SHOWN]],
    }


def check(size: Size, folder: Path, workers: int = 4) -> float:
    """The largest difference between parameters of stacked and of virtual workers, over three blocks."""
    training = Training(BLOCKS[-1], workers, 1e-3)
    lines = size.training(folder)
    rule, steps = training.method.rule.format(period=size.period), 3 * size.period
    every = minibatches(lines, -(-steps * workers // CHUNK) * CHUNK, size.batch, workers, 0)
    batches = [batch for _, batch in zip(range(steps), every, strict=False)]

    def program() -> dict[str, Tensor]:
        model, optimizer = start(training, 0)
        with paceline.attach(model, optimizer, rule, guard=None) as run:
            for batch in batches:
                optimizer.zero_grad()
                loss_of(model, *(tensor[run.world.rank] for tensor in batch)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
                optimizer.step()
        return {name: p.detach() for name, p in run.model_for_export().named_parameters()}

    whole = paceline.simulate(program, workers)[0] or {}
    model, optimizer = start(training, 0)
    found = simulate_stacked(model, loss_of, optimizer, rule, batches, largest_gradient=LARGEST_GRADIENT)
    return max(float((found.parameters[name] - p).abs().max()) for name, p in whole.items())

# SPDX-License-Identifier: Apache-2.0
"""The tasks of `time_to_quality.py`: characters with SGD and with Adam, and lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import _chars
import torch
from _block_methods import Training as BlockTraining
from _lines import minibatches as line_minibatches
from _lines_reader import Reader
from _lines_reader import loss_of as line_loss
from _lines_training import Size
from _lines_training import judged as lines_judged
from _reading import LARGEST_GRADIENT
from _reading import factor as reading_factor
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

Batch = tuple[Tensor, ...]
CHARACTERS, LINES = 16, 4
"""Samples of a minibatch."""


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        name: of the task.
        rate: the best local rate of one worker, at its height; nothing else is tuned.
        period: of blocks.
        recipe: that of today for the optimizer.
        model: makes one.
        loss: of a minibatch.
        optimizer: parameters, rate -> the optimizer.
        batches: folder, minibatches in all, seed -> one minibatch after another.
        factor: of the rate, at a share of the samples.
        judge: model, folder -> held-out loss or error.
        largest_gradient: as `simulate_stacked` has it.
    """

    name: str
    rate: float
    period: int
    recipe: str
    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    optimizer: Callable[[list[nn.Parameter], float], Optimizer]
    batches: Callable[[Path, int, int], Iterator[Batch]]
    factor: Callable[[float], float]
    judge: Callable[[nn.Module, Path], float]
    largest_gradient: float | None = None


def _adam(parameters: list[nn.Parameter], rate: float) -> Optimizer:
    return Adam(parameters, lr=rate, betas=(0.5, 0.999))


def _sgd(parameters: list[nn.Parameter], rate: float) -> Optimizer:
    return SGD(parameters, lr=rate)


def _character_batches(folder: Path, count: int, seed: int) -> Iterator[Batch]:
    for before, after in _chars.batches(_chars.text(folder).train, 1, count, CHARACTERS, seed):
        yield before[0], after[0]


def _line_batches(folder: Path, count: int, seed: int) -> Iterator[Batch]:
    lines = Size(count, LINES, 8).training(folder)
    for rows in line_minibatches(lines, count, LINES, 1, seed):
        yield tuple(tensor[0] for tensor in rows)


def _character_loss(model: nn.Module, folder: Path) -> float:
    return float(_chars.judged(model, dict(model.named_parameters()), _chars.text(folder).validation))


def _line_error(model: nn.Module, folder: Path) -> float:
    return float(lines_judged(model, folder)["error"])


def _perceptron() -> nn.Module:
    return _chars.Perceptron(128, 16)


_character_factor = BlockTraining(2, "sync", 1.0).factor
_CHARACTERS = (_character_batches, _character_factor, _character_loss)

TASKS = {
    task.name: task
    for task in (
        Task("chars-sgd", 0.25, 4, "bmuf", _perceptron, _chars.loss_of, _sgd, *_CHARACTERS),
        Task("chars-adam", 2e-3, 8, "bmuf_adam", _perceptron, _chars.loss_of, _adam, *_CHARACTERS),
        Task(
            "lines",
            2e-3,
            4,
            "bmuf_adam",
            Reader,
            line_loss,
            _adam,
            _line_batches,
            reading_factor,
            _line_error,
            LARGEST_GRADIENT,
        ),
    )
}


def start(task: Task, seed: int) -> tuple[nn.Module, Optimizer]:
    """The model with which all methods begin, and its optimizer."""
    torch.manual_seed(seed)
    model = task.model()
    return model, task.optimizer(list(model.parameters()), task.rate)

# SPDX-License-Identifier: Apache-2.0
"""The tasks of `time_to_quality.py`.

`small-sgd` and `small-adam` guess characters with a model so small that 65,536 minibatches bring it to its plateau;
`small-lines` reads numbers and `small-speech` hears them; both are at their plateau after 32,768.
`chars-sgd` and `chars-adam`, the model of `blocks.py`, `lines` and `speech` are far from theirs at a size that can be
trained here. Both tasks of speech need espeak-ng.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import _chars
import _quality_blstm
import _quality_chat
import _quality_frames
import _quality_lines
import _quality_pictures
import _quality_speech
import torch
import torch.nn.functional as F
from _lines import minibatches as line_minibatches
from _lines_reader import Reader, line_error
from _lines_reader import loss_of as line_loss
from _lines_reader import training as training_lines
from _reading import CHUNK, LARGEST_GRADIENT
from _reading import factor as reading_factor
from _speech import TIMES, kept
from _speech import minibatches as speech_minibatches
from _speech_reader import Listener, letter_error
from _speech_reader import loss_of as speech_loss
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

Batch = tuple[Tensor, ...]
CHARACTERS, LINES, UTTERANCES, DIGITS, FRAMES = 16, 4, 8, 4, 32
PAIRS, PIECES, PICTURES = 16, 32, 16
"""Samples of a minibatch."""
SPOKEN = 12_288  # utterances to train on
CONSTANT, FALL = 0.4, 1000.0
"""Share of the samples that see the full rate, and by what it falls over the rest."""


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        name: of the task.
        rate: the best local rate of one worker, at its height; nothing else is tuned.
        period: of blocks.
        minibatches: of all workers.
        recipe: that of today for the optimizer.
        model: makes one.
        loss: of a minibatch.
        optimizer: parameters, rate -> the optimizer.
        batches: folder, minibatches in all, seed -> one minibatch after another.
        factor: of the rate, at a share of the samples.
        judge: model, folder -> held-out loss or error.
        largest_gradient: as `simulate_stacked` has it.
        error: model, folder -> held-out share of errors, where the task has one beside what judges it.
    """

    name: str
    rate: float
    period: int
    minibatches: int
    recipe: str
    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    optimizer: Callable[[list[nn.Parameter], float], Optimizer]
    batches: Callable[[Path, int, int], Iterator[Batch]]
    factor: Callable[[float], float]
    judge: Callable[[nn.Module, Path], float]
    largest_gradient: float | None = None
    error: Callable[[nn.Module, Path], float] | None = None

    @property
    def moments(self) -> int:
        """Of the optimizer, which are exchanged with the parameters."""
        return 0 if self.optimizer is _sgd else 2


def _adam(parameters: list[nn.Parameter], rate: float) -> Optimizer:
    return Adam(parameters, lr=rate, betas=(0.5, 0.999), fused=True)


def _plain_adam(parameters: list[nn.Parameter], rate: float) -> Optimizer:
    return Adam(parameters, lr=rate)


def _usual_adam(parameters: list[nn.Parameter], rate: float) -> Optimizer:
    return Adam(parameters, lr=rate, fused=True)


def _sgd(parameters: list[nn.Parameter], rate: float) -> Optimizer:
    return SGD(parameters, lr=rate)


def _character_batches(folder: Path, count: int, seed: int) -> Iterator[Batch]:
    for before, after in _chars.batches(_chars.text(folder).train, 1, count, CHARACTERS, seed):
        yield before[0], after[0]


def _line_batches(folder: Path, count: int, seed: int) -> Iterator[Batch]:
    for rows in line_minibatches(training_lines(folder, count * LINES), count, LINES, 1, seed):
        yield tuple(tensor[0] for tensor in rows)


def _number_batches(folder: Path, count: int, seed: int) -> Iterator[Batch]:
    return _quality_lines.batches(folder, count, LINES, seed)


def _digit_batches(folder: Path, count: int, seed: int) -> Iterator[Batch]:
    return _quality_speech.batches(folder, count, DIGITS, seed)


def _speech_batches(folder: Path, count: int, seed: int) -> Iterator[Batch]:
    """All minibatches have TIMES steps, so that those of several workers can be stacked; the rest is padding."""
    said, whole = kept(folder, "training", SPOKEN, held_out=False), -(-count // CHUNK) * CHUNK
    for features, *others in islice(speech_minibatches(said, whole, UTTERANCES, 1, seed), count):
        yield F.pad(features[0], (0, 0, 0, TIMES - features.shape[2])), *(tensor[0] for tensor in others)


def _frame_batches(folder: Path, count: int, seed: int) -> Iterator[Batch]:
    return _quality_frames.batches(folder, count, FRAMES, seed)


def _chat_batches(folder: Path, count: int, seed: int) -> Iterator[Batch]:
    return _quality_chat.batches(folder, count, PAIRS, seed)


def _piece_batches(folder: Path, count: int, seed: int) -> Iterator[Batch]:
    return _quality_blstm.batches(folder, count, PIECES, seed)


def _picture_batches(folder: Path, count: int, seed: int) -> Iterator[Batch]:
    return _quality_pictures.batches(folder, count, PICTURES, seed)


def _character_loss(model: nn.Module, folder: Path) -> float:
    return float(_chars.judged(model, dict(model.named_parameters()), _chars.text(folder).validation))


def _factor(share: float) -> float:
    """Of the rate, when `share` of the samples has been seen."""
    return float(FALL ** -max(0.0, (share - CONSTANT) / (1 - CONSTANT)))


def _listener() -> nn.Module:
    return Listener(64, 1)


def _perceptron() -> nn.Module:
    return _chars.Perceptron(128, 16)


def _small() -> nn.Module:
    return _chars.Perceptron(16, 4)


FAR, PLATEAU, SOON, HEARD, LONG, SHORT = 32_768, 65_536, 32_768, 8_192, 131_072, 8_192
_CHARACTERS = (_character_batches, _factor, _character_loss)
_NUMBERS = (_number_batches, _factor, _quality_lines.held_out_loss, None, _quality_lines.held_out_error)
_DIGITS = (_digit_batches, _factor, _quality_speech.held_out_loss, None, _quality_speech.held_out_error)
_FRAMES = (_frame_batches, _factor, _quality_frames.held_out_loss, None, _quality_frames.held_out_error)
_NET = (_quality_frames.Frames, _quality_frames.loss_of)
_LSTM = (_quality_blstm.Hearing, _quality_blstm.loss_of)
_LAYERS = (_quality_pictures.Layers, _quality_pictures.loss_of)
_CHAT = (_chat_batches, _factor, _quality_chat.held_out_loss, LARGEST_GRADIENT, _quality_chat.held_out_error)
_BLSTM = (_piece_batches, _factor, _quality_blstm.held_out_loss, LARGEST_GRADIENT, _quality_blstm.held_out_error)
_PICTURES = (_picture_batches, _factor, _quality_pictures.held_out_loss, None, _quality_pictures.held_out_error)
_SPEECH = (_speech_batches, reading_factor, letter_error, LARGEST_GRADIENT)
_LINES = (_line_batches, reading_factor, line_error, LARGEST_GRADIENT)

TASKS = {
    task.name: task
    for task in (
        Task("small-sgd", 0.25, 4, PLATEAU, "bmuf", _small, _chars.loss_of, _sgd, *_CHARACTERS),
        Task("small-adam", 8e-3, 4, PLATEAU, "bmuf_adam", _small, _chars.loss_of, _adam, *_CHARACTERS),
        Task("small-lines", 8e-3, 4, SOON, "bmuf_adam", _quality_lines.Templates, line_loss, _adam, *_NUMBERS),
        Task("small-speech", 2e-2, 4, SOON, "bmuf_adam", _quality_speech.Filters, speech_loss, _adam, *_DIGITS),
        Task("chars-sgd", 0.25, 4, FAR, "bmuf", _perceptron, _chars.loss_of, _sgd, *_CHARACTERS),
        Task("chars-adam", 2e-3, 8, FAR, "bmuf_adam", _perceptron, _chars.loss_of, _adam, *_CHARACTERS),
        Task("frames-sgd", 0.1, 4, LONG, "bmuf", *_NET, _sgd, *_FRAMES),
        Task("frames-adam", 2e-3, 4, LONG, "bmuf_adam", *_NET, _usual_adam, *_FRAMES),
        Task("chat-sgd", 8.0, 4, SHORT, "bmuf", _quality_chat.Chat, _quality_chat.loss_of, _sgd, *_CHAT),
        Task("blstm-adam", 3e-2, 4, SHORT, "bmuf_adam", *_LSTM, _usual_adam, *_BLSTM),
        Task("pictures-sgd", 0.05, 4, 2 * SHORT, "bmuf", *_LAYERS, _sgd, *_PICTURES),
        Task("speech", 4e-3, 8, HEARD, "bmuf_adam", _listener, speech_loss, _plain_adam, *_SPEECH),
        Task("lines", 2e-3, 4, FAR, "bmuf_adam", Reader, line_loss, _adam, *_LINES),
    )
}


def start(task: Task, seed: int) -> tuple[nn.Module, Optimizer]:
    """The model with which all methods begin, and its optimizer."""
    torch.manual_seed(seed)
    model = task.model()
    return model, task.optimizer(list(model.parameters()), task.rate)

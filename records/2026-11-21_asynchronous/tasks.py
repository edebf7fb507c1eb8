# SPDX-License-Identifier: Apache-2.0
"""The two tasks of this record: what to learn, with which network, and what the result is judged by.

`digits`: a small residual network on scikit-learn's 1,797 hand-written digits (8 x 8), enlarged by random shifts and
rotations. Group normalisation, not batch normalisation: it has no running averages, which an asynchronous server would
have to merge somehow; the question here is what a late gradient does, not what a late buffer does.

`text`: the character model of `examples/char_lm`, its loader, its clipping and its schedule, shortened.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "char_lm"))

from model import CharLM, validation_loss
from train import LARGEST_GRADIENT, learning_rate, make_loader

from data import Corpus, keep_batch, load_corpus

SIDE = 12  # pixels; the digits' 8 with room to shift and rotate
COPIES, TEST_COPIES = 16, 8  # of each digit, each shifted and rotated otherwise
LARGEST_ANGLE, LARGEST_SHIFT = 25.0, 1.5  # degrees; pixels of the 12
HELD_OUT = 3  # one digit in so many is for the test


class Block(nn.Module):
    """Two 3 x 3 convolutions and a way around them; `stride` 2 halves the side."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(4, outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(4, outside)
        same = inside == outside and stride == 1
        self.around = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(images, inside, side, side) -> (images, outside, side / stride, side / stride)"""
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.around(x) + self.second_norm(self.second(inner)))


class SmallResNet(nn.Module):
    """A convolution, three residual blocks (12 x 12, 6 x 6, 3 x 3), the mean over places, a linear output."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, width)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.output = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (images, 10) for images (images, 1, 12, 12)."""
        return self.output(self.blocks(F.relu(self.norm(self.stem(images)))).mean(dim=(2, 3)))


def enlarge(images: Tensor, copies: int, generator: torch.Generator) -> Tensor:
    """`copies` of each image (n, 8, 8), turned and shifted at random, on 12 x 12 pixels: (copies * n, 1, 12, 12)."""
    images = images.repeat(copies, 1, 1)[:, None]
    count = len(images)
    angle = (torch.rand(count, generator=generator) * 2 - 1) * LARGEST_ANGLE * torch.pi / 180
    shift = (torch.rand(count, 2, generator=generator) * 2 - 1) * LARGEST_SHIFT * 2 / SIDE
    scale = SIDE / 8  # the target's side in units of the source's
    cos, sin = scale * angle.cos(), scale * angle.sin()
    turn = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)  # (count, 2, 2)
    places = F.affine_grid(torch.cat([turn, shift[:, :, None]], 2), [count, 1, SIDE, SIDE], align_corners=False)
    return F.grid_sample(images, places, align_corners=False)


class Pairs(Dataset):
    """Images and labels, a whole minibatch at once."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """(images, 1, 12, 12) and (images,)"""
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.labels[chosen]


@functools.cache
def digits() -> tuple[Pairs, Pairs]:
    """Training and test set; no copy of a training digit is in the test set. The same for every seed."""
    from sklearn.datasets import load_digits

    generator = torch.Generator().manual_seed(2026)
    loaded = load_digits()
    images, labels = torch.tensor(loaded.images).float() / 8, torch.tensor(loaded.target)  # 0..2, black outside
    order = torch.randperm(len(labels), generator=generator)
    test, train = order[: len(order) // HELD_OUT], order[len(order) // HELD_OUT :]
    parts = [(train, COPIES), (test, TEST_COPIES)]
    first, second = (Pairs(enlarge(images[part], n, generator), labels[part].repeat(n)) for part, n in parts)
    return first, second


@functools.cache
def corpus() -> Corpus:
    """Python's standard library, as the demo reads it."""
    return load_corpus()


@dataclass(frozen=True)
class Task:
    """What a training needs: `minibatches` are those of all workers together, `lr` the best found for one worker."""

    model: Callable[[], nn.Module]
    loader: Callable[[int], DataLoader]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    result: Callable[[nn.Module], dict[str, float]]
    measure: str  # which number of the result the tables show
    unit: str
    minibatches: int
    lr: float
    largest_gradient: float | None = None
    schedule: Callable[[float], float] = learning_rate  # share of the rate at a share of the work


def _digits_loader(minibatches: int) -> DataLoader:
    sampler = RandomSampler(digits()[0], num_samples=32 * minibatches)
    return DataLoader(digits()[0], batch_size=32, sampler=sampler, collate_fn=keep_batch)


@torch.no_grad()
def _digits_result(model: nn.Module) -> dict[str, float]:
    images, labels = digits()[1].images, digits()[1].labels
    logits = torch.cat([model(part) for part in images.split(512)])
    wrong = (logits.argmax(1) != labels).float().mean().item()
    return {"error": 100 * wrong, "loss": F.cross_entropy(logits, labels).item()}


TASKS = {
    "digits": Task(
        model=SmallResNet,
        loader=_digits_loader,
        loss=lambda model, images, labels: F.cross_entropy(model(images), labels),
        result=_digits_result,
        measure="error",
        unit="% of the test images",
        minibatches=5760,
        lr=0.2,
    ),
    "text": Task(
        model=CharLM,
        loader=lambda n: make_loader(corpus(), argparse.Namespace(minibatches=n, batch=16, length=16)),
        loss=lambda model, inputs, targets: model.loss(inputs, targets),  # type: ignore[operator]
        result=lambda model: {"loss": validation_loss(model, corpus().validation)},  # type: ignore[arg-type]
        measure="loss",
        unit="nats a character",
        minibatches=3200,
        lr=8.0,
        largest_gradient=LARGEST_GRADIENT,
    ),
}

# SPDX-License-Identifier: Apache-2.0
"""Models so small that every expectation can be summed up: a table of logits for each x, over all y there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline_dual.protocols import Conditional, Prior
from paceline_dual.sequences import PADDING

WORDS = 3
SHORT = [list(word) for length in range(3) for word in itertools.product(range(WORDS), repeat=length)]
"""All sequences of at most 2 tokens over 3 words, 13 of them."""


class Labels:
    """Things that are their own numbers, [B]."""

    @staticmethod
    def number(things: Tensor) -> Tensor:
        return things

    @staticmethod
    def thing(numbers: Tensor) -> Tensor:
        return numbers


class Sequences:
    """Sequences of `SHORT` and their place in it, [B, T] and [B]."""

    every = torch.tensor([[*row, *[PADDING] * (2 - len(row))] for row in SHORT])

    @classmethod
    def number(cls, things: Tensor) -> Tensor:
        wide = nn.functional.pad(things, (0, 2 - things.shape[1]), value=PADDING)
        return (wide[:, None] == cls.every).all(-1).int().argmax(1)

    @classmethod
    def thing(cls, numbers: Tensor) -> Tensor:
        return cls.every[numbers]


Kind = type[Labels] | type[Sequences]


class Table(nn.Module):
    """P(y | x) = softmax of a row of logits, float64."""

    def __init__(self, logits: Tensor, kind: Kind = Labels) -> None:
        super().__init__()
        self.logits, self.kind = nn.Parameter(logits.double()), kind

    def every(self, x: Tensor) -> Tensor:
        """log P of all y there are, [B, number of y]."""
        return self.logits.log_softmax(1)[self.kind.number(x)]

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        return self.every(x).gather(1, self.kind.number(y)[:, None])[:, 0]

    @torch.no_grad()
    def sample(self, x: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
        return self.kind.thing(torch.multinomial(self.every(x).exp(), k, replacement=True, generator=generator))

    @torch.no_grad()
    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        found = self.every(x).sort(dim=1, descending=True, stable=True)
        return self.kind.thing(found.indices[:, :k]), found.values[:, :k]


class Told(nn.Module):
    """A table whose samples, and beam, are given to it beforehand."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table, self.samples, self.scores = table, torch.zeros(0), torch.zeros(0)

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        return self.table.log_prob(y, x)

    def sample(self, x: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
        return self.samples

    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return self.samples, self.scores


class Chances(nn.Module):
    """P(x) from logits."""

    def __init__(self, logits: Tensor, kind: Kind = Labels) -> None:
        super().__init__()
        self.logits, self.kind = nn.Parameter(logits.double()), kind

    def log_prob(self, x: Tensor) -> Tensor:
        return self.logits.log_softmax(0)[self.kind.number(x)]


class Four(NamedTuple):
    """Both directions and both priors."""

    forward_model: Conditional
    backward_model: Conditional
    prior_x: Prior
    prior_y: Prior


class Task(NamedTuple):
    """The same with what they are, for tests that look inside."""

    primal: Table
    dual: Table
    prior: Chances


def task(size: int, seed: int = 0, kind: Kind = Labels) -> Task:
    """Random tables over `size` things on both sides."""
    made = torch.Generator().manual_seed(seed)

    def logits(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    return Task(Table(logits(size, size), kind), Table(logits(size, size), kind), Chances(2 * logits(size), kind))


def from_joint(joint: Tensor) -> Four:
    """The four parts of one joint distribution P(x, y), a table of positive numbers."""
    log = (joint / joint.sum()).log()
    return Four(Table(log), Table(log.T), Chances(log.logsumexp(1)), Chances(log.logsumexp(0)))


def outcomes(table: Table, x: Tensor, k: int) -> Iterator[tuple[Tensor, float]]:
    """All the samples [B, k, ...] that can come, each with its probability: the sum of which is 1."""
    log = table.every(x).detach()
    for numbers in itertools.product(range(log.shape[1]), repeat=len(x) * k):
        drawn = torch.tensor(numbers).view(len(x), k)
        yield table.kind.thing(drawn), float(log.gather(1, drawn).sum().exp())


def slope(value: Callable[[], Tensor], parameter: Tensor, step: float = 1e-5) -> Tensor:
    """The gradient by central differences."""
    found = torch.zeros_like(parameter)
    with torch.no_grad():
        for place in itertools.product(*map(range, parameter.shape)):
            kept = parameter[place].item()
            parameter[place] = kept + step
            up = float(value())
            parameter[place] = kept - step
            found[place] = (up - float(value())) / (2 * step)
            parameter[place] = kept
    return found

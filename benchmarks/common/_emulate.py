# SPDX-License-Identifier: Apache-2.0
"""An emulated accelerator: a model with real parameters and real gradients whose computing is a timed wait.

The accelerator works through its queue on its own: the gradient of each layer is ready at a time that is fixed when the
backward pass begins, whether or not the processor was busy with hooks in between, as with a GPU. So two cores can stand
for eight accelerators, and what a method costs the processor still shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LEARNING_RATE = 1e-4
Step = Callable[[], None]


class Queue:
    """When the accelerator is done with what it was given."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def begin(self) -> None:
        """The processor hands over a pass; the accelerator begins when it is free."""
        self.free_at = max(self.free_at, time.perf_counter())

    def wait(self, seconds: float) -> None:
        """Wait until the accelerator has done the next piece of the pass, which takes it `seconds`."""
        self.free_at += seconds
        left = self.free_at - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Layer(torch.autograd.Function):
    """Passes its input on; gives the weight a gradient that was made before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        layer.queue.wait(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        layer = ctx.layer
        if layer.last:
            layer.queue.begin()
        layer.queue.wait(layer.backward_s)
        return gradients[0], layer.made[0], None


class Layer(nn.Module):
    """A matrix of parameters that nobody multiplies with."""

    def __init__(self, elements: int, queue: Queue, forward_s: float, backward_s: float, last: bool) -> None:
        super().__init__()
        rows = next(r for r in range(int(elements**0.5), 0, -1) if elements % r == 0)
        self.weight = nn.Parameter(1e-2 * torch.randn(rows, elements // rows))
        self.queue, self.forward_s, self.backward_s, self.last = queue, forward_s, backward_s, last
        self.made = [1e-3 * torch.randn_like(self.weight)]  # in a list: it is nobody's parameter and nobody's buffer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Layer.apply(x, self.weight, self)
        return out


class EmulatedModel(nn.Module):
    """`layers` equal layers; a step of it takes `forward_s + backward_s` of the emulated accelerator.

    Args:
        parameters: in all, rounded down to a multiple of `layers`.
        forward_s, backward_s: of the whole model, seconds.
    """

    def __init__(self, parameters: int, layers: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.queue = Queue()
        each = parameters // layers
        times = (forward_s / layers, backward_s / layers)
        self.layers = nn.ModuleList(Layer(each, self.queue, *times, last=k == layers - 1) for k in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        self.queue.begin()
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def emulated_model(
    parameters: int = 25_600_000, layers: int = 16, forward_s: float = 0.1 / 3, backward_s: float = 0.2 / 3
) -> EmulatedModel:
    """A model of the size of ResNet-50 that computes 100 ms a step, two thirds of it backward."""
    return EmulatedModel(parameters, layers, forward_s, backward_s)


def plain_step(model: nn.Module, optimizer: Any) -> Step:
    """The user's loop."""
    x = torch.ones(1, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).backward()
        optimizer.step()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The least that a processor can do for a step."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def idle_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Of all processors together, between two readings of `processor_ticks`."""
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return (spent[3] + spent[4]) / max(1, sum(spent))


def processor_ticks() -> list[int]:
    """Linux's counts of user, nice, system, idle, I/O wait and the rest, of all processors."""
    with open("/proc/stat") as file:
        return [int(word) for word in file.readline().split()[1:9]]

# SPDX-License-Identifier: Apache-2.0
"""A tiny seeded problem, and one training program that every test of a recipe runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.communication import virtual

FEATURES, HIDDEN, CLASSES = 6, 8, 3
State = dict[str, Tensor]


def make_net(
    *, dropout: float = 0.0, norm: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0
) -> nn.Sequential:
    """A seeded perceptron; the global generator is left where the seed put it."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(FEATURES, HIDDEN)]
    if norm:
        layers.append(nn.BatchNorm1d(HIDDEN))
    layers.append(nn.Tanh())
    if dropout:
        layers.append(nn.Dropout(dropout))
    layers.append(nn.Linear(HIDDEN, CLASSES))
    return nn.Sequential(*layers).to(dtype)


def make_data(samples: int = 48, *, dtype: torch.dtype = torch.float32, seed: int = 7) -> TensorDataset:
    """Inputs and the classes that a random linear teacher gives them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=g)
    teacher = torch.randn(FEATURES, CLASSES, generator=g)
    return TensorDataset(x.to(dtype), (x @ teacher).argmax(1))


def adam(params: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    """Adam with a rate that suits the tiny net."""
    return torch.optim.Adam(params, lr=lr, betas=(0.5, 0.9))


def sgd(params: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(params, lr=lr)


def momentum_sgd(params: Any, lr: float = 0.05) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


@contextmanager
def attached(
    model: Any, rule: Any = None, optimizer: Callable[..., Any] = sgd, lr: float | None = None, **settings: Any
) -> Iterator[tuple[paceline.Run, Any, torch.optim.Optimizer]]:
    """A run, its model and `optimizer(the parameters)`, at a rate of one's own where `lr` is given.

    The run ends together with all workers at the end of the `with`.
    """
    made = optimizer(model.parameters(), **({} if lr is None else {"lr": lr}))
    with paceline.attach(model, made, rule, **settings) as run:
        yield run, model, made


def follow(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """A step with the gradients of a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """A step with the cross entropy of a batch."""
    follow(optimizer, nn.functional.cross_entropy(model(x), y))


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """A step with the mean square of the model's outputs, which needs no labels."""
    follow(optimizer, model(x).square().mean())


def state_of(model: nn.Module) -> State:
    """A copy of the model's state."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@dataclass
class Outcome:
    """What a worker's program returns."""

    model: State
    exported: State = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    minibatches: int = 0
    bytes_sent: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Place:
    """What a hook of `Program` may look at or touch."""

    run: paceline.Run
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int
    extra: dict[str, Any]

    @property
    def rank(self) -> int:
        return self.run.world.rank


Hook = Callable[[Place], None]


@dataclass
class Program:
    """A training program with the usual parts, to be run in every worker.

    `after_step` runs after each optimizer step, `before_step` between backward and step; the loss is multiplied by
    `factor(place)` where that is given.
    """

    rule: Any
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    epochs: int = 2
    batch: int = 4
    samples: int = 48
    dropout: float = 0.0
    norm: bool = False
    shuffle: bool = True
    schedule: bool = False
    dtype: torch.dtype = torch.float32
    resume: Any = None
    save_at: int | None = None
    even: bool = True
    save_to: Any = None
    stop_at: int | None = None
    after_step: Hook | None = None
    before_step: Hook | None = None
    factor: Callable[[Place], float] | None = None
    close: bool = True

    def __call__(self) -> Outcome:
        model = make_net(dropout=self.dropout, norm=self.norm, dtype=self.dtype)
        torch.manual_seed(99)
        optimizer = self.optimizer(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7) if self.schedule else None
        loader = DataLoader(make_data(self.samples, dtype=self.dtype), self.batch, shuffle=self.shuffle)
        run = paceline.attach(model, optimizer, self.rule, **self.settings)
        included = {"scheduler": scheduler} if scheduler else {}
        if self.resume is not None:
            run.resume(self.resume, **included)
        elif "checkpoint" in self.settings:
            run.resume(**included)
        out, shared = Outcome({}), run.share(loader, even=self.even)
        step = run.minibatches
        for _ in range(run.epoch, self.epochs):
            for x, y in shared:
                optimizer.zero_grad()
                scores = model(x).float() if self.dtype == torch.bfloat16 else model(x)
                loss = nn.functional.cross_entropy(scores, y)
                place = Place(run, model, optimizer, step, out.extra)
                (loss * self.factor(place) if self.factor else loss).backward()
                if self.before_step:
                    self.before_step(place)
                optimizer.step()
                if scheduler:
                    scheduler.step()
                step += 1
                out.losses.append(float(loss.detach()))
                if self.after_step:
                    self.after_step(place)
                if step == self.save_at:
                    run.save(self.save_to, **included)
                if step == self.stop_at:
                    run.abandon()
                    return out
        out.minibatches = run.minibatches
        if self.close:
            run.close()
        out.model, out.bytes_sent = state_of(model), run.bytes_sent
        out.exported = state_of(run.model_for_export())
        return out


def train(rule: Any, workers: int, /, **choices: Any) -> list[Outcome]:
    """Run `Program(rule, **choices)` on virtual workers."""
    return simulate(Program(rule, **choices), workers)


def simulate(target: Callable[[], Any], workers: int) -> list[Any]:
    """`paceline.simulate` from a known state of the generators."""
    torch.manual_seed(5)
    return list(paceline.simulate(target, workers))


def here() -> virtual.VirtualTransport:
    """The transport of this virtual worker."""
    found = virtual.current()
    assert found is not None
    return found


def rank() -> int:
    """Of this virtual worker."""
    return here().world.rank


def same_bits(one: State, other: State) -> bool:
    """Whether two states hold the same names and the same bits (nan equal to nan)."""
    return one.keys() == other.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and a.cpu().numpy().tobytes() == b.cpu().numpy().tobytes()
        for a, b in ((_plain(one[k]), _plain(other[k])) for k in one)
    )


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def distance(one: State, other: State) -> float:
    """The largest difference of two states."""
    assert one.keys() == other.keys()
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)

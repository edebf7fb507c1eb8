# SPDX-License-Identifier: Apache-2.0
"""How an owner applies a push to a shard: the optimizer's step, a sum, an elastic pull, a moving mean."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.rules.outer.arrival import Arrival, CenterPull, Push
from paceline.update.server.staleness import WorkerClocks

LOCAL_SETTINGS = ("params", "foreach", "fused", "capturable", "differentiable")
"""Settings of an optimizer's group that concern its own tensors and not the method."""

GroupSettings = dict[str, Any]


@dataclass
class IncomingPush:
    """What a worker says about a push to one shard.

    Attributes:
        sender: its rank.
        clock: that it reaches with this push; 1 for the first push.
        version: of the values at which the push was computed.
        minibatches: in the push.
        settings: of the optimizer's group at the sender (learning rate, ...).
        marks: (loader, epoch, begin, end): sample ranges that the push was computed on.
    """

    sender: int
    clock: int
    version: int
    minibatches: int
    settings: GroupSettings = field(default_factory=dict)
    marks: Sequence[Sequence[int]] = ()


class UpdateRule(ABC):
    """How a push is applied."""

    takes_nonfinite = False
    """Whether a push with inf or nan is applied."""

    @abstractmethod
    def apply(self, values: Tensor, anchor: Tensor, origin: Tensor | None, incoming: IncomingPush, push: Push) -> None:
        """Change `anchor` in place by `values`, shape (n,), which may be overwritten."""

    def tensors(self) -> dict[str, Tensor]:
        """State of the anchor's shape."""
        return {}

    def numbers(self) -> dict[str, float]:
        """State that is one number."""
        return {}

    def load(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:  # noqa: B027
        """Restore what `tensors` and `numbers` gave."""


class OptimizerSteps(UpdateRule):
    """Gradients: the user's optimizer steps here, after the outer step has corrected the gradient for its delay.

    Args:
        outer: corrects for delays.
        kind: the optimizer's class; element-wise, so that it does not matter where a tensor is cut.
        anchor: the values.
        settings: of its group, as the user gave them.
    """

    def __init__(self, outer: Arrival, kind: type[Optimizer], anchor: Tensor, settings: GroupSettings) -> None:
        self._outer = outer
        self._parameter = nn.Parameter(anchor, requires_grad=False)  # the same memory
        single: dict[str, Any] = {"foreach": False} if "foreach" in inspect.signature(kind).parameters else {}
        self._optimizer = kind([self._parameter], **single)
        self._step = unprofiled(kind)
        self._group = self._optimizer.param_groups[0]
        self._taken: GroupSettings = {}
        self._take(settings)
        self._state = {name: torch.zeros_like(anchor) for name in outer.tensors}
        self._highest_lr = 0.0

    def _take(self, settings: GroupSettings) -> None:
        if settings is self._taken:
            return
        self._taken = settings
        for name, value in settings.items():
            if name in self._group and name not in LOCAL_SETTINGS:
                self._group[name] = tuple(value) if isinstance(value, list) else value

    def apply(self, values: Tensor, anchor: Tensor, origin: Tensor | None, incoming: IncomingPush, push: Push) -> None:
        """Correct the gradient, and step."""
        self._take(incoming.settings)
        group = self._group
        lr, momentum = float(group["lr"]), float(group.get("momentum", 0.0))
        self._highest_lr = max(self._highest_lr, lr)
        push = Push(push.delay, push.update, push.workers, lr, momentum, self._highest_lr)
        self._outer.mend(values, anchor, origin, self._state, push)
        group["lr"] = push.lr * self._outer.rate(push)
        if "momentum" in group:
            group["momentum"] = self._outer.momentum(push.momentum, push)
        self._parameter.grad = values
        try:
            self._step(self._optimizer)
        finally:
            self._parameter.grad = None
            group["lr"] = push.lr
            if "momentum" in group:
                group["momentum"] = push.momentum

    def _kept(self) -> dict[str, Any]:
        return dict(self._optimizer.state.get(self._parameter, {}))

    def tensors(self) -> dict[str, Tensor]:
        shape = self._parameter.shape
        kept = {k: v for k, v in self._kept().items() if isinstance(v, Tensor) and v.shape == shape}
        return {**self._state, **{f"optimizer.{k}": v for k, v in kept.items()}}

    def numbers(self) -> dict[str, float]:
        shape = self._parameter.shape
        result = {"highest_lr": self._highest_lr}
        for name, value in self._kept().items():
            if isinstance(value, Tensor) and value.shape == shape:
                continue
            if isinstance(value, (Tensor, int, float)) and not (isinstance(value, Tensor) and value.numel() != 1):
                result[f"optimizer.{name}"] = float(value)
        return result

    def load(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        self._highest_lr = numbers.get("highest_lr", 0.0)
        for name in self._state:
            if name in tensors:
                self._state[name].copy_(tensors[name])
        state: dict[str, Any] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                state[name.removeprefix("optimizer.")] = value.clone()
        for name, number in numbers.items():
            if name.startswith("optimizer."):
                key = name.removeprefix("optimizer.")
                state[key] = torch.tensor(number, dtype=torch.float32)
        if state:
            self._optimizer.state[self._parameter] = state


def unprofiled(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """An optimizer's step without what torch puts around it for its profiler and for hooks, of which a shard has none.

    That takes longer than the step of a small shard.
    """
    step: Any = kind.step
    profiled: Any = Optimizer.profile_hook_step(Optimizer.step)
    # Not by torch's mark, which `functools.wraps` copies to what a user puts around the step.
    result: Callable[[Optimizer], Any] = step
    if getattr(step, "__code__", None) is profiled.__code__:
        result = step.__wrapped__
    return result


class AddDelta(UpdateRule):
    """Deltas: a block's delta is added, times the rate that the outer step gives it."""

    def __init__(self, outer: Arrival) -> None:
        self._outer = outer

    def apply(self, values: Tensor, anchor: Tensor, origin: Tensor | None, incoming: IncomingPush, push: Push) -> None:
        """theta += rate d."""
        anchor.add_(values, alpha=self._outer.rate(push))


class ElasticPull(UpdateRule):
    """Elastic averaging: the center moves towards the worker's parameters.

    Args:
        outer: with beta.
        workers: N at the beginning; alpha = beta / N stays as it is when workers leave.
    """

    def __init__(self, outer: CenterPull, workers: int) -> None:
        self._elastic, self._workers = outer, workers

    def apply(self, values: Tensor, anchor: Tensor, origin: Tensor | None, incoming: IncomingPush, push: Push) -> None:
        """center += alpha (x - center)."""
        self._elastic.elastic_step(anchor, values, self._workers)


class TakeBuffer(UpdateRule):
    """Other buffers: those of rank 0, or of the first worker that still takes part.

    Args:
        clocks: of the workers.
    """

    takes_nonfinite = True

    def __init__(self, clocks: WorkerClocks) -> None:
        self._clocks = clocks

    def apply(self, values: Tensor, anchor: Tensor, origin: Tensor | None, incoming: IncomingPush, push: Push) -> None:
        """b = b_i of one worker i."""
        if incoming.sender == self._clocks.first:
            anchor.copy_(values)


class BlendBuffer(UpdateRule):
    """Running statistics: a moving mean over the workers, so that exported buffers stay between valid values."""

    def apply(self, values: Tensor, anchor: Tensor, origin: Tensor | None, incoming: IncomingPush, push: Push) -> None:
        """b += (b_i - b) / N; counters take the largest."""
        if anchor.is_floating_point():
            anchor.lerp_(values, 1.0 / push.workers)
        else:
            torch.maximum(anchor, values, out=anchor)

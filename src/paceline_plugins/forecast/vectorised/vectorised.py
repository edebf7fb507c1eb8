# SPDX-License-Identifier: Apache-2.0
"""N workers of a small model, vectorised: their parameters are stacked, and one step serves all.

    losses_i = loss(theta_i, batch_i)           i = 1 .. N, by torch.func over a leading dimension of the parameters
    gradient of sum_i losses_i = every worker's own gradient, for no loss depends on another worker's parameters

The local optimizers are torch's own over the stacked parameters, since SGD and Adam are element-wise. A block ends with
the rule's own equations (:mod:`paceline.rules.outer`), applied to the mean over the first dimension. The result equals
that of :func:`paceline.simulate` up to rounding, without N passes through Python.

Running statistics are every worker's own, and averaged as in production. Random layers, data-dependent control flow,
tensors that a module keeps in attributes, lossy and asynchronous exchanges, and fragments are refused.
There is no outlier policy: a contribution with inf or nan is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.errors import NonFiniteError, UnsupportedError
from paceline.rules.recipes import make_rule
from paceline.rules.rule import Rule
from paceline_plugins.forecast.vectorised.vectorised_blocks import StackedBlocks, check_rule, share
from paceline_plugins.forecast.vectorised.vectorised_model import StackedModel

Loss = Callable[..., Tensor]
Batch = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class StackedResult:
    """The result of a stacked simulation."""

    parameters: dict[str, Tensor]  # name -> the global model's parameter, in the model's shape and dtype
    losses: Tensor  # of every minibatch before its step, shape (steps, N)
    # name -> the global model's buffer, such as running statistics, likewise
    buffers: dict[str, Tensor] = field(default_factory=dict)


def simulate_stacked(
    model: nn.Module,
    loss_fn: Loss,
    optimizer: Optimizer,
    rule: Rule | str,
    batches: Iterable[Batch],
    *,
    rate: Callable[[int], float] | None = None,
    largest_gradient: float | None = None,
) -> StackedResult:
    """Train N copies of a small model under a rule, all at once.

    Args:
        model: initial model of all workers; it is not changed.
        loss_fn: `loss_fn(model, *batch)` returns a minibatch's scalar loss; it must use the model that it is given.
        optimizer: SGD, Adam or AdamW over the model's trainable parameters, without steps; its settings are used.
        rule: sync, averaging, bmuf, bmuf_adam, diloco, or text such as "bmuf(period=8)".
        batches: for each step a tensor, or several, of shape (N, ...): the minibatch of each worker.
        rate: step (the first is 0) -> factor of the learning rates; None for 1.
        largest_gradient: clips gradients to this norm: each worker's own within a block, the mean where gradients are
            exchanged; None does not clip.

    Returns:
        The global model after the last block, however short, and all losses.

    Raises:
        UnsupportedError: model, optimizer or rule cannot be stacked; use `paceline.simulate`.
        NonFiniteError: a worker's parameters or gradient held inf or nan at an exchange.
    """
    chosen = make_rule(rule, {})
    check_rule(chosen)
    check_stackable(model, optimizer)
    workers: StackedWorkers | None = None
    losses = []
    for step, batch in enumerate(batches):
        tensors = (batch,) if isinstance(batch, Tensor) else tuple(batch)
        if workers is None:
            workers = StackedWorkers(model, loss_fn, optimizer, chosen, _number(tensors))
        losses.append(workers.step(tensors, 1.0 if rate is None else rate(step), largest_gradient))
    if workers is None:
        raise UnsupportedError("batches is empty; give a tensor (N, ...) for each step")
    parameters, buffers = workers.finish()
    return StackedResult(parameters, torch.stack(losses), buffers)


class StackedWorkers:
    """N workers: their parameters, their optimizers, the rule between them.

    Args: as of `simulate_stacked`; `number` is N, `measures` is whether to measure how many workers all are worth.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        optimizer: Optimizer,
        rule: Rule,
        number: int,
        measures: bool = False,
    ) -> None:
        self.number, self._model = number, StackedModel(model, loss_fn, number)
        self._optimizer = _stacked(optimizer, model, self._model.parameters)
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        # where the number grows one worker ends its blocks as several do
        blocks = rule.schedule.exchanges_blocks and (measures or rule.exchanges_among(number))
        buffers = self._model.buffers, self._model.of_worker_0
        make = partial(StackedBlocks, rule, optimizer, self._optimizer, *buffers, number, measures)
        self._blocks = make() if blocks else None
        self._together, self._factor = number > 1, rule.rate_factor(number)

    def step(self, batch: tuple[Tensor, ...], factor: float, largest: float | None) -> Tensor:
        """A minibatch on every worker, and the exchange after it if one is due; the losses, shape (N,)."""
        if _number(batch) != self.number:
            raise UnsupportedError(f"a step has {_number(batch)} minibatches where the first had {self.number}")
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor * self._factor
        self._optimizer.zero_grad()
        losses = self._model.losses(batch)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self._model.settle()
        if self._together and (self._blocks is None or self._blocks.lockstep):
            self._share_gradients(losses)
            for name, buffer in self._model.buffers.items():
                share(buffer, name in self._model.of_worker_0)
        if largest is not None:  # after the exchange, as in the production code
            self._clip(largest)
        self._optimizer.step()
        if self._blocks is not None:
            self._blocks.stepped()
        return losses.detach()

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._model.parameters.values() if p.grad is not None]

    @torch.no_grad()
    def _clip(self, largest: float) -> None:
        """As `torch.nn.utils.clip_grad_norm_` does, on each worker."""
        gradients = self._gradients()
        parts = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients])
        share = (largest / (torch.linalg.vector_norm(parts, dim=0) + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(share.view(-1, *[1] * (gradient.dim() - 1)))

    @torch.no_grad()
    def _share_gradients(self, losses: Tensor) -> None:
        """Replace every worker's gradient by the mean."""
        for gradient in self._gradients():
            mean = gradient.mean(0, keepdim=True)
            if not bool(torch.isfinite(mean).all()):
                finite = torch.isfinite(losses).tolist()
                bad = ", ".join(str(rank) for rank, well in enumerate(finite) if not well)
                raise NonFiniteError(
                    f"inf or nan in a gradient{f' of worker {bad}' if bad else ''}; lower the learning rate, or use "
                    "paceline.simulate, which leaves such a worker out"
                )
            gradient.copy_(mean.expand_as(gradient))

    @property
    def effective(self) -> float:
        """How many workers they were worth in the last blocks."""
        return 1.0 if self._blocks is None else self._blocks.effective

    @property
    def in_block(self) -> bool:
        """Whether a block has begun and is not complete."""
        return self._blocks is not None and self._blocks.made > 0

    def grow(self, number: int) -> None:
        """Continue with more workers after a block; a new one starts with the state of one that trains."""
        each, grown = torch.arange(number) % self.number, self._model.grow(number)
        states = self._optimizer.state
        for p, larger in grown.items():
            state = states.pop(p, {})
            states[larger] = {k: v[each] if torch.is_tensor(v) and v.shape == p.shape else v for k, v in state.items()}
        for group in self._optimizer.param_groups:
            group["params"] = [grown[p] for p in group["params"]]
        self.number = number
        if self._blocks is not None:
            self._blocks.grow(grown, self._model.buffers, number)

    def finish(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The global model at the end: parameters and buffers."""
        if self._blocks is not None:
            self._blocks.finish()
        counts = {name: count.clone() for name, count in self._model.counts.items()}
        return self._globals(self._model.parameters), self._globals(self._model.buffers) | counts

    def _globals(self, stacked: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks = self._blocks
        return {
            name: (tensor.detach()[0] if blocks is None else blocks.global_of(tensor)).clone()
            for name, tensor in stacked.items()
        }


def _number(batch: tuple[Tensor, ...]) -> int:
    """N, of a step's tensors."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in batch}
    if len(sizes) != 1 or not min(sizes):
        raise UnsupportedError(f"a step's tensors must have the shape (N, ...) with one N, got {sorted(sizes)}")
    return int(sizes.pop())


def _stacked(optimizer: Optimizer, model: nn.Module, parameters: dict[str, Tensor]) -> Optimizer:
    """The same optimizer over the stacked parameters."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    groups = []
    for group in optimizer.param_groups:
        known = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
        groups.append({**known, "params": [parameters[names[id(p)]] for p in group["params"] if id(p) in names]})
    kind: Any = type(optimizer)
    made: Optimizer = kind(groups)
    return made


def check_stackable(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse a model or optimizer that cannot be stacked, before the first step."""
    if type(optimizer) not in (SGD, Adam, AdamW):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not known to be element-wise; use torch's SGD, Adam or AdamW"
        )
    if optimizer.state:
        raise UnsupportedError("the optimizer has made steps already; give a fresh one")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise UnsupportedError(
                f"{name} has no shape yet; give a minibatch to the model once, and then make the optimizer"
            )
    own, trained = {id(p) for group in optimizer.param_groups for p in group["params"]}, {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            trained[id(p)] = name
            if p.dtype not in (torch.float32, torch.float64):
                raise UnsupportedError(f"{name} is {p.dtype}; only float32 and float64 are stacked")
    if own - trained.keys() or trained.keys() - own:
        raise UnsupportedError("the optimizer must hold exactly the model's trainable parameters")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UnsupportedError(
                f"{name or 'the model'} has sparse gradients, which are not stacked; use sparse=False"
            )
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise UnsupportedError(
                f"{name or 'the model'} (SyncBatchNorm) takes the statistics of all workers together, and stacked "
                "workers have each their own; use BatchNorm"
            )

# SPDX-License-Identifier: Apache-2.0
"""N workers of a small model, vectorised: their parameters are stacked, and one step serves all.

    losses_i = loss(theta_i, batch_i)           i = 1 .. N, by torch.func over a leading dimension of the parameters
    gradient of sum_i losses_i = every worker's own gradient, for no loss depends on another worker's parameters

The local optimizers are torch's own over the stacked parameters, since SGD and Adam are element-wise. A block ends with
the rule's own equations (:mod:`paceline.rules.outer`), applied to the mean over the first dimension. The result equals
that of :func:`paceline.simulate` up to rounding, without N passes through Python.

Running statistics, random layers, data-dependent control flow, lossy, delayed and asynchronous exchanges are refused.
There is no outlier policy: a contribution with inf or nan is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.errors import NonFiniteError, UnsupportedError
from paceline.forecast.sim.vectorised_blocks import StackedBlocks, check_rule
from paceline.rules.recipes import make_rule
from paceline.rules.rule import Rule

Loss = Callable[..., Tensor]
Batch = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class StackedResult:
    """The result of a stacked simulation.

    Attributes:
        parameters: name -> the global model's parameter, in the model's shape and dtype.
        losses: of every minibatch before its step, shape (steps, N).
    """

    parameters: dict[str, Tensor]
    losses: Tensor


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
    return StackedResult(workers.finish(), torch.stack(losses))


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
        self.number, self._model = number, model
        self._loss_fn = loss_fn
        self._parameters = {
            name: p.detach().expand(number, *p.shape).clone().requires_grad_(True)
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        self._stack = tuple(self._parameters.values())
        self._places = _places(model)
        self._versions = [(name, buffer, buffer._version) for name, buffer in model.named_buffers()]
        self._optimizer = _stacked(optimizer, model, self._parameters)
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._losses = vmap(self._loss, randomness="error")
        # where the number grows one worker ends its blocks as several do
        blocks = rule.schedule.exchanges_blocks and (measures or rule.exchanges_among(number))
        self._blocks = StackedBlocks(rule, optimizer, self._optimizer, number, measures) if blocks else None
        self._together, self._factor = number > 1, rule.rate_factor(number)

    def _loss(self, *tensors: Tensor) -> Tensor:
        """One worker's loss; `functional_call` would search the parameters in every call."""
        for store, key, number, _ in self._places:
            store[key] = tensors[number]
        try:
            return self._loss_fn(self._model, *tensors[len(self._stack) :])
        finally:
            for store, key, _, own in self._places:
                store[key] = own

    def step(self, batch: tuple[Tensor, ...], factor: float, largest: float | None) -> Tensor:
        """A minibatch on every worker, and the exchange after it if one is due; the losses, shape (N,)."""
        if _number(batch) != self.number:
            raise UnsupportedError(f"a step has {_number(batch)} minibatches where the first had {self.number}")
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor * self._factor
        self._optimizer.zero_grad()
        losses = self._forward(batch)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        if self._together and (self._blocks is None or self._blocks.lockstep):
            self._share_gradients(losses)
        if largest is not None:  # after the exchange, as in the production code
            self._clip(largest)
        self._optimizer.step()
        if self._blocks is not None:
            self._blocks.stepped()
        return losses.detach()

    def _forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        try:
            losses: Tensor = self._losses(*self._stack, *batch)
        except RuntimeError as error:
            if not any(word in str(error).lower() for word in ("vmap", "batching rule")):
                raise
            why = str(error).strip().splitlines()[0]
            raise UnsupportedError(f"this model or loss cannot be stacked: {why}; use paceline.simulate") from error
        if losses.shape != (self.number,):
            raise UnsupportedError(f"loss_fn must give a scalar, got the shape {tuple(losses.shape[1:])}")
        for name, buffer, version in self._versions:
            if buffer._version != version:
                raise UnsupportedError(f"the model writes into its buffer {name}, which workers do not have each")
        return losses

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters.values() if p.grad is not None]

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
        each = torch.arange(number) % self.number
        grown = {p: p.detach()[each].requires_grad_(True) for p in self._stack}
        states = self._optimizer.state
        for p, larger in grown.items():
            state = states.pop(p, {})
            states[larger] = {k: v[each] if torch.is_tensor(v) and v.shape == p.shape else v for k, v in state.items()}
        for group in self._optimizer.param_groups:
            group["params"] = [grown[p] for p in group["params"]]
        self._parameters = {name: grown[p] for name, p in self._parameters.items()}
        self._stack, self.number = tuple(self._parameters.values()), number
        if self._blocks is not None:
            self._blocks.grow(grown, number)

    def retune(self, rule: Rule) -> None:
        """Continue with another period after a block."""
        if self._blocks is not None:
            self._blocks.retune(rule)

    def finish(self) -> dict[str, Tensor]:
        """The global model at the end."""
        if self._blocks is not None:
            self._blocks.finish()
        return self.global_model()

    def global_model(self) -> dict[str, Tensor]:
        """The global model after the last block, copies by name."""
        found = {}
        for name, stacked in self._parameters.items():
            whole = stacked.detach()[0] if self._blocks is None else self._blocks.global_of(stacked)
            found[name] = whole.clone()
        return found


def _places(model: nn.Module) -> list[tuple[Any, str, int, Tensor]]:
    """Where modules keep the trained parameters: (dictionary, key, number, parameter); tied ones have several."""
    numbers = {id(p): number for number, p in enumerate(p for p in model.parameters() if p.requires_grad)}
    return [
        (module._parameters, key, numbers[id(p)], p)
        for module in model.modules()
        for key, p in module._parameters.items()
        if p is not None and p.requires_grad
    ]


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
    own, trained = {id(p) for group in optimizer.param_groups for p in group["params"]}, {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            trained[id(p)] = name
            if p.dtype not in (torch.float32, torch.float64):
                raise UnsupportedError(f"{name} is {p.dtype}; only float32 and float64 are stacked")
    if own - trained.keys() or trained.keys() - own:
        raise UnsupportedError("the optimizer must hold exactly the model's trainable parameters")
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False) and module.training:
            raise UnsupportedError(
                f"{name or 'the model'} ({type(module).__name__}) keeps running statistics, which are not stacked; "
                "use paceline.simulate, or a layer without them (GroupNorm, LayerNorm)"
            )

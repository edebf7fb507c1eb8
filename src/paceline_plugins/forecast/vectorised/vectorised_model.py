# SPDX-License-Identifier: Apache-2.0
"""The user's model with the tensors of N workers in its place, for the time of one forward pass.

=====================================  ==============================================================================
trained parameters, numeric buffers    a row for each worker
counts (integer buffers)               one for all: workers make the same number of minibatches
other buffers, frozen parameters       the model's own; a model that writes into one is refused
tensors in other attributes            may be read in the pass that sets them (an auxiliary loss), not in the next one
=====================================  ==============================================================================

`torch.func.functional_call` would search all names in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from paceline.core.flat import averaged_buffers, other_buffers
from paceline.errors import UnsupportedError

Place = tuple[dict[str, Any], str, int]
"""A module's dictionary, the key in it, and the number of the tensor there; tied ones have several places."""
INSTEAD = "use paceline.simulate"
REGISTERED = ("_parameters", "_buffers", "_modules")
"""What `nn.Module` keeps in attributes of its own."""


class SpentTensor:
    """Stands where a forward pass left a tensor of all workers; only to be overwritten."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def refuse(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            f"this model or loss cannot be stacked: it keeps a tensor in {self.__dict__['_name']} from one minibatch "
            f"to the next; make it a buffer (register_buffer), or {INSTEAD}"
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(one for one in _flat([*args, *(kwargs or {}).values()]) if isinstance(one, cls)).refuse()

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __neg__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __lt__ = __gt__ = __le__ = __ge__ = refuse


class StackedModel:
    """A model of N workers.

    Args:
        model: the user's; between passes it is as it was.
        loss_fn: `loss_fn(model, *batch)`, a minibatch's loss.
        number: N.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor], number: int) -> None:
        self._model, self._loss_fn, self.number = model, loss_fn, number
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        others = {name: b for name, b in other_buffers(model) if _is_number(b)}
        numbers = dict(averaged_buffers(model)) | others
        floating = {name: b for name, b in numbers.items() if b.is_floating_point()}
        counts = {name: b for name, b in numbers.items() if not b.is_floating_point()}
        # name -> every worker's, shape (N, ...).
        self.parameters = {name: _rows(p, number).requires_grad_(True) for name, p in trained.items()}
        # name -> every worker's floating-point buffer, likewise
        self.buffers = {name: _rows(b, number) for name, b in floating.items()}
        self.of_worker_0 = others.keys() & floating.keys()  # names of those that are not averaged: all take worker 0's
        self.counts = {name: b.detach().clone() for name, b in counts.items()}  # name -> an integer buffer
        places = {id(t): k for k, t in enumerate([*trained.values(), *floating.values(), *counts.values()])}
        self._places: list[Place] = []
        self._others: list[tuple[str, dict[str, Any], str, int]] = []
        for prefix, module in model.named_modules():
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                store = module._parameters if key in module._parameters else module._buffers
                if tensor is not None and id(tensor) in places:
                    self._places.append((store, key, places[id(tensor)]))
                elif tensor is not None:
                    self._others.append((f"{prefix}.{key}".lstrip("."), store, key, tensor._version))
        self._first_buffer, self._first_count = len(trained), len(trained) + len(floating)
        self._spent: dict[tuple[str, str], SpentTensor] = {}

    def losses(self, batch: Sequence[Tensor]) -> Tensor:
        """Every worker's loss, shape (N,); call `settle` after the backward pass.

        Raises `UnsupportedError` where the model cannot be stacked.
        """
        own = (*self.parameters.values(), *(b.detach() for b in self.buffers.values()), *self.counts.values())
        each = (0,) * self._first_count + (None,) * len(self.counts) + (0,) * len(batch)
        try:
            losses, written = vmap(self._one, in_dims=each, randomness="error")(*own, *batch)
        except RuntimeError as error:
            if not any(word in str(error).lower() for word in ("vmap", "batching rule", "batchedtensor")):
                raise
            why = str(error).strip().splitlines()[0]
            raise UnsupportedError(f"this model or loss cannot be stacked: {why}; {INSTEAD}") from error
        self._written: tuple[Tensor, ...] = written
        if losses.shape != (self.number,):
            raise UnsupportedError(f"loss_fn must give a scalar, got the shape {tuple(losses.shape[1:])}")
        found: Tensor = losses
        return found

    @torch.no_grad()
    def settle(self) -> None:
        """Take the buffers that the pass wrote."""
        now = dict(zip([*self.buffers, *self.counts], self._written, strict=True))
        for name, buffer in self.buffers.items():
            if now[name].shape != buffer.shape:
                raise UnsupportedError(
                    f"the buffer {name} had the shape {tuple(buffer.shape[1:])} and has {tuple(now[name].shape[1:])} "
                    f"after a minibatch, which cannot be stacked; {INSTEAD}"
                )
            if now[name].data_ptr() != buffer.data_ptr():
                buffer.copy_(now[name])
        for name, count in self.counts.items():
            if not bool((now[name] == now[name][:1]).all()):
                raise UnsupportedError(f"the workers count differently in the buffer {name}; {INSTEAD}")
            count.copy_(now[name][0])
        self._written = ()

    def grow(self, number: int) -> dict[Tensor, Tensor]:
        """Continue with more workers; what stands in the place of each stacked parameter."""
        each = torch.arange(number) % self.number
        grown = {p: p.detach()[each].requires_grad_(True) for p in self.parameters.values()}
        self.parameters = {name: grown[p] for name, p in self.parameters.items()}
        self.buffers = {name: b[each] for name, b in self.buffers.items()}
        self.number = number
        return grown

    def _one(self, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One worker's loss and what it wrote into its buffers."""
        own = [(store, key, store[key]) for store, key, _ in self._places]
        others: list[tuple[str, dict[str, Any], str, Any, int]] = [
            (name, store, key, store[key], version) for name, store, key, version in self._others
        ]
        count = self._first_count + len(self.counts)
        try:
            for store, key, number in self._places:
                store[key] = tensors[number]
            with self._attributes(), _EachRow():
                loss = self._loss_fn(self._model, *tensors[count:])
            for name, store, key, before, version in others:
                if store.get(key) is not before or getattr(before, "_version", None) != version:
                    raise UnsupportedError(f"the model writes into {name}, which workers do not have each; {INSTEAD}")
            return loss, self._read(tensors)
        finally:
            for store, key, tensor in own:
                store[key] = tensor
            for _, store, key, tensor, _ in others:
                store[key] = tensor

    def _read(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The present buffers, which the model may have replaced."""
        now = list(tensors[self._first_buffer : self._first_count + len(self.counts)])
        for store, key, number in self._places:
            if number >= self._first_buffer and store.get(key) is not tensors[number]:
                if not isinstance(store.get(key), Tensor):
                    raise UnsupportedError(f"the model drops its buffer {key} in a minibatch; {INSTEAD}")
                now[number - self._first_buffer] = store[key]
        return tuple(now)

    @contextmanager
    def _attributes(self) -> Iterator[None]:
        """Find the tensors that the pass leaves in attributes of modules, and put back what was there."""
        modules = {name: vars(module) for name, module in self._model.named_modules()}
        before = {name: dict(own) for name, own in modules.items()}
        for (name, key), spent in self._spent.items():
            modules[name][key] = spent
        try:
            yield
            for name, own in modules.items():
                for key, value in own.items():
                    if key not in REGISTERED and any(_is_stacked(one) for one in _flat([value])):
                        spent = self._spent[name, key] = SpentTensor(f"{name}.{key}".lstrip("."))
                        if value is before[name].get(key):  # a list that the pass has not begun
                            spent.refuse()
        finally:
            for name, key in self._spent:
                modules[name].pop(key, None)
                if key in before[name]:
                    modules[name][key] = before[name][key]


EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
"""Arguments of `torch.nn.functional.embedding`."""


class _EachRow(TorchFunctionMode):
    """Mends what `vmap` gets wrong: of an embedding's `padding_idx`, only worker 0 would have no gradient (torch 2.13,
    which looks the rows of all workers up in one table)."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not nn.functional.embedding:
            return function(*args, **(kwargs or {}))
        given = dict(zip(EMBEDDING, args, strict=False)) | (kwargs or {})
        padding = given.pop("padding_idx", None)
        found = function(**given)
        if padding is None:
            return found
        padded = given["input"] == padding % given["weight"].shape[0]
        return torch.where(padded.unsqueeze(-1), found.detach(), found)


def _is_number(buffer: Tensor) -> bool:
    """Whether its elements are finite real numbers."""
    return not buffer.is_complex() and buffer.dtype != torch.bool and bool(torch.isfinite(buffer).all())


def _rows(tensor: Tensor, number: int) -> Tensor:
    """A row for each worker."""
    return tensor.detach().expand(number, *tensor.shape).clone()


def _is_stacked(value: Any) -> bool:
    return isinstance(value, Tensor) and is_batchedtensor(value)


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    """Values, and those in lists, tuples and dictionaries."""
    for value in values:
        if isinstance(value, dict):
            yield from _flat(list(value.values()))
        elif isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value

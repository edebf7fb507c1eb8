# SPDX-License-Identifier: Apache-2.0
"""The global model, for evaluation, saving and export."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.flat import Modules, is_sharded, local, module_list, reshard, trainable
from paceline.errors import UnsupportedError
from paceline.update.engine.protocol import GlobalPart


def unwrapped(model: Modules) -> Any:
    """The modules without torch.compile's wrappers, in the same list or dictionary."""
    if isinstance(model, nn.Module):
        return getattr(model, "_orig_mod", model)
    if isinstance(model, dict):
        return {name: unwrapped(module) for name, module in model.items()}
    return [unwrapped(module) for module in model]


def plain_state(model: Modules) -> dict[str, Tensor]:
    """The state dictionary of the unwrapped modules, prefixed if there are several; no copies."""
    found: dict[str, Tensor] = {}
    for prefix, module in module_list(unwrapped(model)):
        found |= {prefix + name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    return found


def global_tensors(parts: Sequence[GlobalPart]) -> dict[str, Tensor]:
    """Name -> parameter or buffer of the global model, in the model's own dtype and shape; copies."""
    found: dict[str, Tensor] = {}
    for part in parts:
        found |= part.fragment.unflatten(part.exported)
    return found


def global_parts(model: Modules, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dictionary with `values` in place of the worker's own; no copies. Tied names share a value."""
    plain = plain_state(model)
    by_memory = {local(plain[name]).data_ptr(): value for name, value in values.items() if name in plain}
    return {
        name: values[name] if name in values else by_memory.get(local(tensor).data_ptr(), tensor)
        for name, tensor in plain.items()
    }


def global_state(model: Modules, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `global_parts`; copies, each in memory of its own. It may keep `values`."""
    copies = {id(value) for value in values.values()}
    found = {}
    for name, tensor in global_parts(model, values).items():
        found[name] = tensor if id(tensor) in copies else tensor.detach().clone()
        copies.discard(id(tensor))  # a tied name gets another copy
    return found


@torch.no_grad()
def twin(model: Modules, values: dict[str, Tensor]) -> Any:
    """A copy of the unwrapped model (or models) that holds `values`; raises `UnsupportedError` for shards, which a copy
    would have to gather for itself."""
    if any(is_sharded(parameter) for _, parameter in trainable(model)):
        raise UnsupportedError(
            "a model whose parameters are shards (fully_shard) cannot be copied; evaluate it in `with "
            "run.global_model():`, or save the shards of run.global_state() with torch.distributed.checkpoint"
        )
    copied = copy.deepcopy(unwrapped(model))
    for prefix, module in module_list(copied):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if prefix + name in values:
                local(tensor).copy_(values[prefix + name])
    return copied


@contextlib.contextmanager
def swapped(model: Modules, parts: Sequence[GlobalPart]) -> Iterator[None]:
    """Context in which the user's tensors hold the global values; restores their own."""
    with torch.no_grad():
        for part in parts:
            part.fragment.refresh()
        own = [[local(tensor).clone() for tensor in part.fragment.tensors] for part in parts]
        settle(model, parts)
    try:
        yield
    finally:
        reshard(model)
        with torch.no_grad():
            for part, values in zip(parts, own, strict=True):
                for tensor, value in zip(part.fragment.tensors, values, strict=True):
                    local(tensor).copy_(value)


@torch.no_grad()
def settle(model: Modules, parts: Sequence[GlobalPart]) -> None:
    """Leave the global values in the user's tensors."""
    reshard(model)
    for part in parts:
        part.fragment.refresh()
        part.fragment.write(0, part.fragment.numel, part.exported)

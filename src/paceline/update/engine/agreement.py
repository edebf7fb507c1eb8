# SPDX-License-Identifier: Apache-2.0
"""The common start: all workers attached the same model, rule and settings, and take rank 0's model, trained or not.

What is exchanged later (trained parameters, buffers) is broadcast as a whole. The rest (frozen parameters, those
outside of the optimizers, sparse buffers) never travels again, so that workers that were seeded differently would train
round different layers to the end. It may be most of a large model that all have loaded
from the same file: checksums are compared first, and what differs anywhere is broadcast.

Parameters that another attached run trains are left alone: that run broadcasts them itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.communication import Transport
from paceline.communication.base import same_json
from paceline.core.bits import as_bytes, checksum, is_plain, key
from paceline.core.flat import Fragment, Modules, exchanged_buffers, exchanged_parts, local, module_list
from paceline.core.optimizer_state import Named, Owned
from paceline.errors import MismatchError, UnsupportedError
from paceline.rules.rule import Rule
from paceline.update.engine import exit_handling
from paceline.update.engine.global_model import plain_state


def about_optimizers(owned: list[tuple[Optimizer, Named]]) -> dict[str, Any]:
    """The properties that all workers' optimizers must share: classes, groups, and whether they have state."""
    names = {id(parameter): name for _, named in owned for name, parameter in named}
    groups = [
        [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
        for optimizer, _ in owned
    ]
    return {
        "optimizer": [type(optimizer).__name__ for optimizer, _ in owned],
        "optimizer state at attach": [len(optimizer.state) > 0 for optimizer, _ in owned],
        "parameters of the groups": [[zlib.crc32(" ".join(group).encode()) for group in one] for one in groups],
    }


def check_same(transport: Transport, rule: Rule, rows: list[list[object]], settings: dict[str, Any]) -> None:
    """Compare rule, settings and layout (rows of name, shape, dtype and kind); raises the same error on all workers."""
    mine = {"rule": rule.text(), "settings": settings, "rows": rows}
    if same_json(transport, mine):
        return
    world, gathered = transport.world, transport.gather_json(mine)
    for rank, one in enumerate(gathered):
        if difference := _difference(world.name(0), gathered[0], world.name(rank), one):
            raise MismatchError(world.sign(difference))


def _difference(who: str, first: dict[str, Any], other: str, one: dict[str, Any]) -> str:
    """How another worker's differ from the first one's; "" where they do not."""
    if one["rule"] != first["rule"]:
        return f"{who} runs the rule {first['rule']} and {other} {one['rule']}"
    models, same = "the workers' models differ", "build the same model everywhere"
    for mine, theirs in zip(first["rows"], one["rows"], strict=False):
        if mine != theirs:
            return (
                f"{models}: {who} has {mine[0]} of shape {tuple(mine[1])} and dtype {mine[2]}, "
                f"{other} has {theirs[0]} of shape {tuple(theirs[1])} and dtype {theirs[2]}; {same}"
            )
    if len(one["rows"]) != len(first["rows"]):
        return f"{models}: {who} has {len(first['rows'])} tensors, {other} {len(one['rows'])}; {same}"
    for name, value in first["settings"].items():
        if one["settings"].get(name) != value:
            return f"{who} has {name}={value!r} and {other} {one['settings'].get(name)!r}; give all workers the same"
    return ""


@torch.no_grad()
def broadcast_start(transport: Transport, parts: Sequence[Fragment], source: int = 0) -> None:
    """All workers take the values of rank `source`."""
    for part in parts:
        device = transport.wire_device(part.device)
        part.refresh()
        flat = part.whole(device)
        transport.broadcast(flat, source).wait()
        part.write(0, part.numel, flat)


PIECE_BYTES = 1 << 24
"""Bytes broadcast at a time."""
LEAST_FROZEN_BYTES = 1 << 20
"""A smaller tensor is copied wherever a state is: that costs nothing, and the file of a global model has it."""


def untrained(model: Modules, owned: Owned) -> list[tuple[str, Tensor]]:
    """(name, tensor) pairs that workers never exchange and no other run trains; each tensor once."""
    seen = {id(parameter) for _, named in owned for _, parameter in named}
    seen |= {id(buffer) for _, buffer, _ in exchanged_buffers(model)} | set(exit_handling.trained)
    found = []
    for prefix, module in module_list(model):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found.append((prefix + name, tensor))
    return found


def frozen(model: Modules, owned: Owned) -> dict[str, Tensor]:
    """The large tensors of the state dictionary that no exchange changes: the program might, and mostly does not."""
    rest = {tensor.data_ptr() for _, tensor in untrained(model, owned) if is_plain(tensor)}
    return {
        name: tensor
        for name, tensor in plain_state(model).items()
        if is_plain(tensor)
        and tensor.numel() * tensor.element_size() >= LEAST_FROZEN_BYTES
        and tensor.data_ptr() in rest
    }


def frozen_keys(model: Modules, owned: Owned) -> dict[str, str]:
    """Name -> present key of each large tensor that no exchange changes."""
    return {name: key(name, one) for name, one in frozen(model, owned).items()}


def layout(named: list[tuple[str, Tensor]]) -> list[list[object]]:
    """Their layout, which every worker must share; serializable as JSON."""
    return [[name, list(local(t).shape), str(t.dtype).removeprefix("torch."), "untrained"] for name, t in named]


def begin_together(
    transport: Transport, rule: Rule, model: Modules, owned: Owned, settings: dict[str, Any]
) -> list[Fragment]:
    """Check that all workers attached the same, else raise `MismatchError` on each, and give them rank 0's model;
    returns its exchanged fragments."""
    rest, parts = untrained(model, owned), exchanged_parts(model, owned)
    rows = [row for part in parts for row in part.layout()] + layout(rest)
    check_same(transport, rule, rows, settings | about_optimizers(owned))
    exit_handling.claim(transport, owned)
    broadcast_start(transport, parts)
    take_untrained(transport, rest)
    return parts


@torch.no_grad()
def take_untrained(transport: Transport, named: Sequence[tuple[str, Tensor]]) -> None:
    """Every worker takes rank 0's values of the tensors that differ on any worker. Raises `UnsupportedError` on every
    worker if a tensor of the same shape has memory of another size."""
    memories = [(name, leaf) for name, tensor in named for leaf in _memory(local(tensor))]
    if not memories:  # on all workers, which have compared their layouts
        return
    sums = [[leaf.numel() * leaf.element_size(), *checksum(leaf)] for _, leaf in memories]
    if same_json(transport, sums):
        return
    gathered = transport.gather_json(sums)
    others = [(k, rows) for k, rows in enumerate(zip(*gathered, strict=True)) if any(r != rows[0] for r in rows)]
    for k, rows in others:
        if any(row[0] != rows[0][0] for row in rows):
            raise UnsupportedError(
                transport.world.sign(
                    f"{memories[k][0]} is not trained, and takes {sorted({row[0] for row in rows})} bytes on different "
                    "workers; build the same model everywhere"
                )
            )
    for k, _ in others:
        tensor = memories[k][1]
        flat = as_bytes(tensor).clone()
        for begin in range(0, flat.numel(), PIECE_BYTES):
            piece = flat[begin : begin + PIECE_BYTES]
            wire = piece.to(transport.wire_device(piece.device))
            transport.broadcast(wire, 0).wait()
            piece.copy_(wire)
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def _memory(tensor: Tensor) -> Iterator[Tensor]:
    """The strided tensors that hold a tensor's numbers: itself, or the parts of a subclass or a sparse layout."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _memory(getattr(tensor, name))
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.values(), tensor.crow_indices(), tensor.col_indices())
    elif tensor.layout != torch.strided:
        yield from (tensor.values(), tensor.ccol_indices(), tensor.row_indices())
    elif tensor.numel():
        yield tensor

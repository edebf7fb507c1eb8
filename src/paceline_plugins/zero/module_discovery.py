# SPDX-License-Identifier: Apache-2.0
"""Finds the modules that optimizers train: among live objects, the outermost ones that own their parameters."""

from __future__ import annotations

import gc

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline_plugins.zero import refusals


def trained(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that it trains, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def modules(optimizers: list[Optimizer]) -> list[nn.Module]:
    """The outermost modules that own the trained parameters, in the order of their first one.

    Raises:
        Refusal: an optimizer trains a tensor that no module owns, or that another optimizer trains, too.
    """
    gc.collect()  # drop modules that the program no longer holds
    owner_of = _optimizer_of(optimizers)
    place = {id(parameter): number for number, (parameter, _) in enumerate(owner_of)}
    living = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and not _passes_on(one)]
    owners = [(owner, owned) for owner in living if (owned := _owned(owner, place))]
    inner = {id(child) for owner, _ in owners for child in owner.modules() if child is not owner}
    outermost = [(owner, owned) for owner, owned in owners if id(owner) not in inner]
    outermost.sort(key=lambda pair: (min(place[number] for number in pair[1]), -len(pair[1])))
    chosen: list[nn.Module] = []
    left = set(place)
    for owner, owned in outermost:
        if left & owned:
            chosen.append(owner)
            left -= owned
    for parameter, optimizer in owner_of:
        if id(parameter) in left:
            raise refusals.unowned_parameter(tuple(parameter.shape), optimizer)
    return chosen


def copied(optimizer: Optimizer, roots: list[nn.Module]) -> str:
    """The class of the module that it trains, if that is a copy of one of these or of a part of them; else ""."""
    parts = [module for root in roots for module in root.modules()]
    owners, kinds = modules([optimizer]), set(map(_kind, parts))
    return name(owners[0]) if all(_kind(one) in kinds and one not in parts for one in owners) else ""


def has_twin(module: nn.Module, roots: list[nn.Module]) -> bool:
    """Whether it is one of the roots, and another one may be a copy of it."""
    return sum(_kind(root) == _kind(module) for root in roots) > 1 and any(root is module for root in roots)


def is_copy(module: nn.Module, roots: list[nn.Module]) -> bool:
    """Whether it has the shape of one of the roots, and is none of them."""
    return module not in roots and any(_kind(root) == _kind(module) for root in roots)


def copies(roots: list[nn.Module]) -> list[tuple[nn.Module, nn.Module]]:
    """Each root with a living module of its shape that has parameters of its own."""
    types = {type(root) for root in roots}
    living = [one for one in gc.get_objects() if type(one) in types and "_parameters" in vars(one)]
    pairs = [(root, one) for one in living if one not in roots for root in roots if is_copy(one, [root])]
    return [(root, one) for root, one in pairs if not {*root.parameters()} & {*one.parameters()}]


def _kind(module: nn.Module) -> tuple[object, ...]:
    return type(module), *(parameter.shape for parameter in module.parameters())


def _optimizer_of(optimizers: list[Optimizer]) -> list[tuple[Tensor, str]]:
    """Each trained parameter, with the name of its optimizer."""
    owner: dict[int, Optimizer] = {}
    pairs = [(parameter, one) for one in optimizers for parameter in trained(one)]
    for parameter, one in pairs:
        first = owner.setdefault(id(parameter), one)
        if first is not one:
            inside = next((name for name, value in vars(first).items() if value is one), "")
            names = type(first).__name__, type(one).__name__
            raise refusals.shared_parameter(tuple(parameter.shape), *names, inside)
    return [(parameter, type(one).__name__) for parameter, one in pairs]


def _passes_on(module: nn.Module) -> bool:
    """Whether it calls the module inside and does nothing else: DataParallel over the one device of a worker."""
    return issubclass(type(module), nn.DataParallel) and len(vars(module).get("device_ids", ())) < 2


def _owned(module: nn.Module, place: dict[int, int]) -> set[int]:
    if "_parameters" not in vars(module):
        return set()  # its __init__ is still under way
    return {id(parameter) for parameter in module.parameters() if id(parameter) in place}


def name(thing: object) -> str:
    """Its class name; under torch.compile, that of the wrapped module."""
    return type(getattr(thing, "_orig_mod", thing)).__name__

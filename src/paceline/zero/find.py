# SPDX-License-Identifier: Apache-2.0
"""Which modules an optimizer trains, found among the objects that live: the outermost ones that own its parameters."""

from __future__ import annotations

import gc

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.zero import refusals


def trained(optimizer: Optimizer) -> list[Tensor]:
    """What it trains, in its own order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def modules(optimizer: Optimizer) -> list[nn.Module]:
    """The outermost modules that own what it trains, in the order of their first parameter in it.

    Raises:
        Refusal: it trains a tensor that no module has.
    """
    gc.collect()  # what the program has dropped is not its model
    place = {id(parameter): number for number, parameter in enumerate(trained(optimizer))}
    owners = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and _owns(thing, place)]
    inner = {id(child) for owner in owners for child in owner.modules() if child is not owner}
    outermost = [owner for owner in owners if id(owner) not in inner]
    outermost.sort(key=lambda owner: (_first(owner, place), -len(_covered(owner, place))))
    chosen: list[nn.Module] = []
    left = set(place)
    for owner in outermost:
        if left & _covered(owner, place):
            chosen.append(owner)
            left -= _covered(owner, place)
    for parameter in trained(optimizer):
        if id(parameter) in left:
            raise refusals.homeless(tuple(parameter.shape), type(optimizer).__name__)
    return chosen


def _owns(module: nn.Module, place: dict[int, int]) -> bool:
    # vars: a module whose __init__ is still under way has no parameters yet
    return "_parameters" in vars(module) and bool(_covered(module, place))


def _covered(module: nn.Module, place: dict[int, int]) -> set[int]:
    return {id(parameter) for parameter in module.parameters() if id(parameter) in place}


def _first(module: nn.Module, place: dict[int, int]) -> int:
    return min(place[number] for number in _covered(module, place))


def name(thing: object) -> str:
    """Its class, of the module inside where torch.compile wrapped it."""
    return type(getattr(thing, "_orig_mod", thing)).__name__

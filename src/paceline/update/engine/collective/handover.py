# SPDX-License-Identifier: Apache-2.0
"""What a worker takes over from another one beside the model: the optimizers' settings and state, the schedules of
their rates, the GradScaler, and the included objects."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from paceline.communication import Transport
from paceline.core.optimizer_state import Owned
from paceline.core.state_tree import build, flatten
from paceline.update.engine.context import RunContext
from paceline.update.engine.gradients.update import GradientExchanges


class Handover:
    """Gives other workers one worker's state.

    Args:
        run: the context that the parts of the run share.
        gradients: know the GradScaler.

    Attributes:
        included: gives the objects that a worker takes over, by name.
    """

    def __init__(self, run: RunContext, gradients: GradientExchanges) -> None:
        self._run, self._gradients = run, gradients
        self.included: Callable[[], dict[str, Any]] = dict

    def give(self, source: int, takes: bool, transport: Transport | None = None, state: bool = True) -> None:
        """Worker `source` gives its state to those that take it; every worker of the connection calls it.

        Args:
            source: its rank on the connection.
            takes: whether this worker takes what is given.
            transport: the connection; that of all workers by default.
            state: whether the optimizers' state is given, beside their settings and the objects.
        """
        transport = transport if transport is not None else self._run.transport
        given = broadcast(transport, self._state(state) if transport.world.rank == source else None, source)
        if takes:
            self._take(given)

    @property
    def _objects(self) -> dict[str, Any]:
        """What has a state of its own beside the optimizers."""
        found = dict(self.included())
        known = {id(thing) for thing in found.values()}
        scalers = [self._run.settings.scaler, *(update.scaling.scaler for update in self._gradients.updates)]
        scaler = next((one for one in scalers if one is not None), None)
        others = {**schedulers(self._run.owned), **({"GradScaler": scaler} if scaler is not None else {})}
        return found | {name: thing for name, thing in others.items() if id(thing) not in known}

    def _state(self, state: bool) -> dict[str, Any]:
        states = [optimizer.state_dict() for optimizer, _ in self._run.owned]
        return {
            "optimizers": states if state else [],
            "groups": [
                [{name: value for name, value in group.items() if name != "params"} for group in one["param_groups"]]
                for one in states
            ],
            "objects": {name: thing.state_dict() for name, thing in self._objects.items()},
        }

    def _take(self, given: dict[str, Any]) -> None:
        for (optimizer, _), saved in zip(self._run.owned, given["optimizers"], strict=False):
            optimizer.load_state_dict(saved)
        for (optimizer, _), groups in zip(self._run.owned, given["groups"], strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                _set(group, saved)
        for name, thing in self._objects.items():
            if name in given["objects"]:
                thing.load_state_dict(given["objects"][name])


def schedulers(owned: Owned) -> dict[str, LRScheduler]:
    """The program's schedulers of these optimizers, by a name that is the same on every worker."""
    numbers = {id(optimizer): number for number, (optimizer, _) in enumerate(owned)}
    all_of_them = [
        thing
        for thing in gc.get_objects()  # torch keeps no list of them
        if issubclass(type(thing), LRScheduler) and id(getattr(thing, "optimizer", None)) in numbers
    ]
    inner = {id(one) for outer in all_of_them for one in getattr(outer, "_schedulers", ())}
    found: dict[str, LRScheduler] = {}
    for one in all_of_them:
        name = f"{type(one).__name__} of optimizer {numbers[id(one.optimizer)]}"
        while name in found:
            name += "'"
        if id(one) not in inner:
            found[name] = one
    return found


def broadcast(transport: Transport, own: dict[str, Any] | None, source: int) -> dict[str, Any]:
    """The state of worker `source` on every worker."""
    tensors = dict[str, Tensor]()
    rest = flatten(own, tensors, "")
    rows = [[name, flatten(one.dtype, {}, ""), list(one.shape)] for name, one in tensors.items()]
    rest, rows = transport.gather_json([rest, rows])[source]
    found: dict[str, Tensor] = {}
    for name, kind, shape in rows:
        whole = torch.empty(shape, dtype=build(kind, {}))
        if own is not None:
            whole.copy_(tensors[name])
        flat = whole.reshape(-1).view(torch.uint8)
        on_wire = flat.to(transport.wire_device(flat.device))
        if flat.numel():
            transport.broadcast(on_wire, source).wait()
            flat.copy_(on_wire)
        found[name] = whole
    state: dict[str, Any] = build(rest, found)
    return state


def _set(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Take over the settings of a parameter group; in place where they are tensors."""
    for name, value in saved.items():
        if isinstance(group.get(name), Tensor):
            group[name].copy_(value)
        else:
            group[name] = value

# SPDX-License-Identifier: Apache-2.0
"""What the launcher's process group is to simulated workers: they meet over it when a run begins."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from devtools.world.process import Process, World
from torch import Tensor

from paceline.communication.base import CompletedOperation, Pending, SoloTransport
from paceline.core import runtime
from paceline.core.world import World as Coordinates
from paceline.errors import PeerLostError

LOOK_S = 0.01
"""Between two looks whether all have come."""


class Group:
    """The meetings of all workers, in order.

    Args:
        world: of the workers.
        size: how many there are.

    Attributes:
        processes: by rank.
    """

    def __init__(self, world: World, size: int) -> None:
        self.world, self.size = world, size
        self.processes: dict[int, Process] = {}
        self._said: dict[int, dict[int, Any]] = {}

    def meet(self, number: int, me: Coordinates, value: Any, limit_s: float) -> list[Any]:
        """What all say at their meeting of this number, in rank order; PeerLostError if one is dead or late."""
        said = self._said.setdefault(number, {})
        said[me.rank] = value
        until = runtime.monotonic() + limit_s
        while len(said) < self.size:
            runtime.sleep(LOOK_S * self.world.rng.random())
            missing = [rank for rank in range(self.size) if rank not in said]
            dead = [rank for rank in missing if self.processes[rank].dead]
            if dead or runtime.monotonic() > until:
                why = "died" if dead else f"did not come within {limit_s:g} s"
                raise PeerLostError(me.sign(f"{me.names(dead or missing)} {why} while all began"))
        return [said[rank] for rank in range(self.size)]


class GroupTransport(SoloTransport):
    """A worker's connection to the others: only what a run under an asynchronous rule asks of it."""

    name = "simulated"

    def __init__(self, group: Group, me: Coordinates, limit_s: float) -> None:
        super().__init__(me)
        self._group, self._limit_s, self._met = group, limit_s, 0

    def _meet(self, value: Any) -> list[Any]:
        self._met += 1
        return self._group.meet(self._met, self.world, value, self._limit_s)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        out.copy_(torch.stack(self._meet(x.clone())))
        return CompletedOperation()

    def broadcast(self, x: Tensor, source: int) -> Pending:
        x.copy_(self._meet(x.clone())[source])
        return CompletedOperation()

    def all_reduce(self, x: Tensor) -> Pending:
        self._refuse()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        self._refuse()

    def all_to_all(self, out: Tensor, x: Tensor, out_sizes: Any = None, in_sizes: Any = None) -> Pending:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError("the group of simulated workers only gathers and broadcasts")

# SPDX-License-Identifier: Apache-2.0
"""Parameters that several processes hold as shards (DTensors), as `fully_shard` of torch makes them.

These processes are one worker. An inf, or the norm of a contribution, each of them sees in its own shard only, so they
tell each other before the worker says anything about itself: else some would apply what others reject.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.core.flat import Modules, is_sharded, local, module_list
from paceline.errors import UnsupportedError


class Shards:
    """The processes that hold the parameters of this worker; without any, a worker is one process.

    Args:
        parameters: of the worker.

    Raises:
        UnsupportedError: its shards lie in several groups of processes, or in a mesh of several dimensions.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        sharded: list[Any] = [one for one in parameters if is_sharded(one)]
        meshes = {one.device_mesh for one in sharded}
        self._mesh: Any = next(iter(meshes), None)
        self._device = local(sharded[0]).device if sharded else None
        if len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
            raise UnsupportedError(
                "the parameters of one worker are sharded over several meshes, or over one of several dimensions; "
                "shard all of them over one mesh of one dimension, such as fully_shard(model, mesh=mesh['shard'])"
            )

    def __bool__(self) -> bool:
        return self._mesh is not None

    @property
    def place(self) -> tuple[int, int]:
        """Which shard this process holds, and of how many."""
        return (self._mesh.get_local_rank(), self._mesh.size()) if self else (0, 1)

    def all(self, yes: bool) -> bool:
        """Whether all processes of the worker say so."""
        return yes if not self else not self._sums(not yes)[0]

    def together(self, norm: float, mean_norm: float, finite: bool) -> tuple[float, float, bool]:
        """Two norms of the whole worker, and whether all of it is finite, from those of this process."""
        if not self:
            return norm, mean_norm, finite
        squares = self._sums(norm**2, mean_norm**2, not finite)
        return math.sqrt(squares[0]), math.sqrt(squares[1]), not squares[2]

    def _sums(self, *numbers: float) -> list[float]:
        row = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(row, group=self._mesh.get_group())
        sums: list[float] = row.tolist()
        return sums


def reshard(model: Modules) -> None:
    """Drop what forward passes have gathered of the shards; it would be read in place of changed ones."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for _, root in module_list(model) if kind else ():
        for module in root.modules():
            if isinstance(module, kind):
                module.reshard()

# SPDX-License-Identifier: Apache-2.0
"""The common part of the strategies for Lightning's Trainer and for Fabric: ranks, collectives, checkpoint folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.lazy import needed
from paceline.doors.adapters.adapter import FOLDER, Adapter
from paceline.errors import UnsupportedError
from paceline.run.run import Run

with needed("the adapter for Lightning", "lightning"):
    from lightning.fabric.utilities.rank_zero import rank_zero_only

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda gather_rows: gather_rows.to(torch.promote_types(gather_rows.dtype, torch.float32)).mean(0),
    "sum": lambda gather_rows: gather_rows.sum(0),
    "max": lambda gather_rows: gather_rows.amax(0),
    "min": lambda gather_rows: gather_rows.amin(0),
}


class WorkersMixin:
    """Ranks, devices and collectives of a strategy."""

    adapter: Adapter
    parallel_devices: Any

    @property
    def run(self) -> Run | None:
        """The run of the last training."""
        return self.adapter.run

    world_size = property(lambda self: self.adapter.world.size)
    global_rank = property(lambda self: self.adapter.world.rank)
    local_rank = property(lambda self: self.adapter.world.local_rank)
    is_global_zero = property(lambda self: self.adapter.world.rank == 0)

    @property
    def node_rank(self) -> int:
        """The number of this worker's host, in rank order."""
        world = self.adapter.world
        return list(dict.fromkeys(world.hosts)).index(world.host) if world.host in world.hosts else 0

    @property
    def root_device(self) -> torch.device:
        """This worker's device; the workers of a host take its devices in turn."""
        devices = self.parallel_devices or [torch.device("cpu")]
        result: torch.device = devices[self.local_rank % len(devices)]
        return result

    def set_world_ranks(self) -> None:
        """Give Lightning's loggers this worker's rank."""
        _set_rank(self.global_rank)
        self.adapter.belongs(_Rank(self.global_rank))

    def barrier(self, name: str | None = None) -> None:
        self.adapter.transport.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.adapter.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads:
            raise self.adapter.unsupported(
                "all_gather(sync_grads=True) would send gradients back; use sync_grads=False"
            )
        return self.adapter.gather_rows(tensor) if self.adapter.distributed else tensor

    def reduced(self, tensor: Any, operation: Any) -> Any:
        """Reduce a tensor over the workers in rank order; other values stay unchanged."""
        if not isinstance(tensor, Tensor) or not self.adapter.distributed:
            return tensor
        name = str(getattr(operation, "name", operation) or "mean").lower().replace("avg", "mean")
        if name not in OPERATIONS:
            raise UnsupportedError(f"cannot reduce by {name!r}; take one of {', '.join(OPERATIONS)}")
        return OPERATIONS[name](self.adapter.gather_rows(tensor))


class _Rank:
    """Lightning's rank, for each virtual worker of a simulation."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def take(self) -> None:
        _set_rank(0)

    def put(self) -> None:
        _set_rank(self._rank)


def _set_rank(rank: int) -> None:
    # Lightning has no call for it: its own strategies and launchers assign this attribute, which its loggers read.
    setattr(rank_zero_only, "rank", rank)  # noqa: B010


def state_folder(filepath: Any) -> Path:
    """The folder of paceline's part of a checkpoint file.

    Raises:
        UnsupportedError: the file is not on a file system of this host.
    """
    if "://" in str(filepath):
        raise UnsupportedError(
            f"paceline's part of a checkpoint goes into a folder beside it, which is not possible at {filepath}; write "
            "checkpoints to a directory that all workers can read"
        )
    return Path(f"{filepath}.{FOLDER}")

# SPDX-License-Identifier: Apache-2.0
"""This worker's rank before attaching, from the variables of its launcher or scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.communication import schedulers


@dataclass(frozen=True)
class ZeroWorker:
    """A worker as its launcher numbers it.

    Attributes:
        rank: 0 <= rank < size.
        size: workers.
        local_rank: within the host.
        log: the run's log directory, or None.
        random_data: whether the program draws its samples at random, so that each worker draws different ones.
    """

    rank: int
    size: int
    local_rank: int
    log: Path | None
    random_data: bool


def from_environment(environment: Mapping[str, str]) -> ZeroWorker:
    """The rank that a launcher or a scheduler gives; else that of a single worker."""
    worker, log = schedulers.worker(environment), environment.get("PACELINE_LOG")
    rank, size, local_rank = (0, 1, 0) if worker is None else (worker.rank, worker.size, worker.local_rank)
    random_data = environment.get("PACELINE_RANDOM_DATA") == "1"
    return ZeroWorker(rank, size, local_rank, Path(log) if log else None, random_data)


def own_device(worker: ZeroWorker, visible: str | None, devices: int) -> str | None:
    """The CUDA_VISIBLE_DEVICES by which the program's "cuda" is this worker's device.

    Args:
        worker: this worker.
        visible: the variable's present value, or None.
        devices: visible CUDA devices.

    Returns:
        None where there is nothing to choose.
    """
    if devices < 2 or worker.size == 1:
        return None
    names = [name.strip() for name in visible.split(",")] if visible else [str(number) for number in range(devices)]
    return names[worker.local_rank % len(names)]

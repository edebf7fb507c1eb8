# SPDX-License-Identifier: Apache-2.0
"""Who this worker is before anything is attached: from the launcher's variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """A worker as its launcher numbers it.

    Attributes:
        rank: 0 <= rank < size.
        size: workers.
        local_rank: within the host.
        log: the run's log directory, or None.
        random_data: whether the program makes its samples itself, at random, so that each worker draws others.
    """

    rank: int
    size: int
    local_rank: int
    log: Path | None
    random_data: bool


def from_environment(environment: Mapping[str, str]) -> Place:
    """As torch.distributed's launchers say it; alone where they do not."""
    log = environment.get("PACELINE_LOG")
    return Place(
        int(environment.get("RANK", "0")),
        int(environment.get("WORLD_SIZE", "1")),
        int(environment.get("LOCAL_RANK", "0")),
        Path(log) if log else None,
        environment.get("PACELINE_RANDOM_DATA") == "1",
    )


def own_device(place: Place, visible: str | None, devices: int) -> str | None:
    """What CUDA_VISIBLE_DEVICES has to be, so that the program's "cuda" is a device of this worker alone.

    Args:
        place: this worker.
        visible: what the variable is, or None.
        devices: how many CUDA devices there are to see.

    Returns:
        None where there is nothing to choose.
    """
    if devices < 2 or place.size == 1:
        return None
    names = [name.strip() for name in visible.split(",")] if visible else [str(number) for number in range(devices)]
    return names[place.local_rank % len(names)]

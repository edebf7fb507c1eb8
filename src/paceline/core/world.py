# SPDX-License-Identifier: Apache-2.0
"""One worker's coordinates in the cluster.

A worker is one process with one device, or one virtual worker (:mod:`paceline.communication.virtual.transport`).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from paceline.core import runtime


def host_name() -> str:
    """The name of this host, for messages (never used to connect to anything)."""
    simulated = runtime.host()
    return socket.gethostname() if simulated is None else simulated[0]


@dataclass(frozen=True)
class World:
    """Coordinates of one worker."""

    rank: int = 0  # this worker, 0 <= rank < size
    size: int = 1  # number of workers, N in the equations
    local_rank: int = 0  # this worker within its host, 0 <= local_rank < local_size
    local_size: int = 1  # number of workers on this host
    host: str = field(default_factory=host_name)
    hosts: tuple[str, ...] = ()  # of every rank, in rank order; empty before the workers have connected

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must lie in 0..{self.size - 1}, got {self.rank}")

    def sign(self, message: str) -> str:
        """`message` followed by this worker's rank and host, if there are several workers."""
        if self.size == 1:
            return message
        return f"{message} [rank {self.rank} of {self.size} on {self.host}]"

    def name(self, rank: int) -> str:
        """Rank `rank` for messages, with its host if that is known."""
        if rank < len(self.hosts):
            return f"rank {rank} on {self.hosts[rank]}"
        return f"rank {rank}"

    def names(self, ranks: list[int]) -> str:
        """`name` of each of these ranks, with commas between them."""
        return ", ".join(self.name(rank) for rank in ranks)

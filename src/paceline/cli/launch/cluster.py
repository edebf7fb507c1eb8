# SPDX-License-Identifier: Apache-2.0
"""The shape of a run, as the command line gives it. Apart, because what starts it loads torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchCluster:
    """How many hosts, which of them this is, and how many workers on each.

    Attributes:
        workers: on each host.
        hosts: in all.
        host_index: of this host; ranks follow it.
        master: host name and port where several hosts meet; None on one host.
        timeout_s: after so many seconds somebody who does not answer is lost.
    """

    workers: int
    hosts: int = 1
    host_index: int = 0
    master: tuple[str, int] | None = None
    timeout_s: float = 600.0

    @property
    def size(self) -> int:
        """Workers of all hosts."""
        return self.workers * self.hosts

    def coordinates(self, local_rank: int, rank: int, size: int, master: tuple[str, str]) -> dict[str, str]:
        """The variables by which torch.distributed and paceline know which of this host's workers one is.

        Args:
            local_rank: of the worker, on this host.
            rank: of the worker.
            size: workers of all hosts, which need not have equally many.
            master: address and port of the store where the workers meet.
        """
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.host_index),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "worker",
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "GROUP_WORLD_SIZE": str(self.hosts),
            "ROLE_WORLD_SIZE": str(size),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": master[1],
        }

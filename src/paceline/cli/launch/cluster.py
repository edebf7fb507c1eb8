# SPDX-License-Identifier: Apache-2.0
"""The shape of a run, from the command line. A file of its own, so that it can be used before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchCluster:
    """The hosts of a run, and the workers on each.

    Attributes:
        workers: on each host.
        hosts: in all.
        host_index: of this host; ranks follow it.
        master: host name and port of the rendezvous of several hosts; None on one host.
        timeout_s: a worker that does not answer for so long is lost.
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

    def silent(self) -> str:
        """That host 0, which has the launchers' store, does not answer."""
        host, port = self.master or ("", 0)
        return f"host 0 has not answered at {host}:{port} for {self.timeout_s:g} s: did it end, or is the link cut?"

    def coordinates(self, local_rank: int, rank: int, size: int, master: tuple[str, str]) -> dict[str, str]:
        """The variables that tell a worker its rank and the address of the store, as torchrun sets them.

        `size` counts the workers of all hosts, which need not have equally many.
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


def address_text(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets around the colons of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

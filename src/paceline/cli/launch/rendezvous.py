# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a run's launchers: torch's store, at 127.0.0.1 on one host, else at the address of `--master`."""

from __future__ import annotations

import socket
import uuid

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.prestart import PrestartedWorkers
from paceline.communication.torch.store import LOOPBACK, open_store


class LauncherRendezvous(StaticTCPRendezvous):
    """torchrun's rendezvous of a fixed number of hosts, with host 0's store at a socket of ours."""

    listener: socket.socket | None = None  # of a store that prestarted workers already connect to

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store on host 0, and wait for all launchers."""
        if self._store is None and self.listener is not None:
            file = self.listener.detach()
            self._store = TCPStore(
                self.master_addr, self.master_port, 1, True, self.timeout, wait_for_workers=False, master_listen_fd=file
            )
        elif self._store is None and self.rank == 0:
            self._store = open_store(self.master_addr, self.master_port, self.timeout, self.world_size, wait=True)
            self.master_port = self._store.port
        return super().next_rendezvous()


def rendezvous_of(cluster: LaunchCluster, prestarted: PrestartedWorkers | None = None) -> LauncherRendezvous:
    """On one host at a free port, on several at `--master`."""
    if prestarted is not None:
        port = prestarted.listener.getsockname()[1]
        handler = LauncherRendezvous(LOOPBACK, port, 0, 1, prestarted.run_id, int(cluster.timeout_s))
        handler.listener = prestarted.listener
        return handler
    if cluster.master is None:
        return LauncherRendezvous(LOOPBACK, 0, 0, 1, uuid.uuid4().hex, int(cluster.timeout_s))
    address, port = cluster.master
    return LauncherRendezvous(address, port, cluster.host_index, cluster.hosts, "paceline", int(cluster.timeout_s))

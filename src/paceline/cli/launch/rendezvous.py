# SPDX-License-Identifier: Apache-2.0
"""Where the launchers of a run meet: torch's store, on one host at 127.0.0.1, on several at what `--master` names."""

from __future__ import annotations

import socket
import uuid

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.prestart import Begun
from paceline.communication.torch.store import LOOPBACK, open_store


class Meeting(StaticTCPRendezvous):
    """torchrun's meeting of a fixed number of hosts, with the store of host 0 at a socket of ours."""

    door: socket.socket | None = None  # where workers that have been started already look for the store

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store on host 0, and wait there and elsewhere until all launchers have come."""
        if self._store is None and self.door is not None:
            file = self.door.detach()
            self._store = TCPStore(
                self.master_addr, self.master_port, 1, True, self.timeout, wait_for_workers=False, master_listen_fd=file
            )
        elif self._store is None and self.rank == 0:
            self._store = open_store(self.master_addr, self.master_port, self.timeout, self.world_size, wait=True)
            self.master_port = self._store.port
        return super().next_rendezvous()


def meeting(cluster: LaunchCluster, begun: Begun | None = None) -> Meeting:
    """The meeting of a run's launchers: one host meets itself on a free port, several meet at the master."""
    if begun is not None:
        port = begun.door.getsockname()[1]
        found = Meeting(LOOPBACK, port, 0, 1, begun.run_id, int(cluster.timeout_s))
        found.door = begun.door
        return found
    if cluster.master is None:
        return Meeting(LOOPBACK, 0, 0, 1, uuid.uuid4().hex, int(cluster.timeout_s))
    address, port = cluster.master
    return Meeting(address, port, cluster.host_index, cluster.hosts, "paceline", int(cluster.timeout_s))

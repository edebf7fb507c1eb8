# SPDX-License-Identifier: Apache-2.0
"""Where the launchers of a run meet: torch's store, open at one address of host 0 and at no other.

torch's own listens at every interface of the host, also where it is told an address, and asks nobody who they are. So
the socket is made here and given to it: on one host 127.0.0.1, on several the address that `--master` names.
"""

from __future__ import annotations

import ipaddress
import socket
import uuid

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from .cluster import Cluster

LOOPBACK = "127.0.0.1"
BACKLOG = 2048  # workers connect all at once


class Meeting(StaticTCPRendezvous):
    """torchrun's meeting of a fixed number of hosts, with the store of host 0 at a socket of ours."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store on host 0, and wait there and elsewhere until all launchers have come."""
        if self._store is None and self.rank == 0:
            listener = _listener(self.master_addr, self.master_port)
            if listener is not None:
                self.master_port = listener.getsockname()[1]
                self._store = TCPStore(
                    self.master_addr,
                    self.master_port,
                    self.world_size,
                    True,
                    self.timeout,
                    master_listen_fd=listener.detach(),
                )
        return super().next_rendezvous()


def meeting(cluster: Cluster) -> Meeting:
    """The meeting of a run's launchers: one host meets itself on a free port, several meet at the master."""
    if cluster.master is None:
        return Meeting(LOOPBACK, 0, 0, 1, uuid.uuid4().hex, int(cluster.timeout_s))
    address, port = cluster.master
    return Meeting(address, port, cluster.host_index, cluster.hosts, "paceline", int(cluster.timeout_s))


def _listener(host: str, port: int) -> socket.socket | None:
    """A socket at the one address that `host` names; None where that is no address of this host that others reach.

    That may be: behind a router that passes connections on, or where a host knows its own name by a loopback address
    only. Then torch's store listens everywhere.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, _, _, _, where in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        if _is_loopback(str(where[0])) and not is_local(host):
            continue
        try:
            return socket.create_server((str(where[0]), port), family=family, backlog=BACKLOG)
        except OSError:  # no address of this host, or the port is taken, which torch says better
            continue
    return None


def is_local(host: str) -> bool:
    """Whether by this name every host means itself."""
    return host == "localhost" or _is_loopback(host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False

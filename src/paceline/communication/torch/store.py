# SPDX-License-Identifier: Apache-2.0
"""Addresses of this host, and torch's store, open at one of them and at no other.

torch's own listens at every interface of the host, also where it is told an address, and asks nobody who they are. So
the socket is made here and given to it.
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from paceline.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
BACKLOG = 2048  # workers connect all at once


def open_store(host: str, port: int, timeout: timedelta, size: int | None = None, wait: bool = False) -> TCPStore:
    """The store at that address, opened here.

    Args:
        host: a name or an address of this host, by which other workers reach it.
        port: 0 for any; the store's `port` says which.
        timeout: of its operations.
        size: how many will use it, where that is known.
        wait: for all of them to come.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # here, for `paceline run --print`

    listener = listen(host, port)
    if listener is None:
        return TCPStore(host, port, size, True, timeout, wait_for_workers=wait)
    port, descriptor = listener.getsockname()[1], listener.detach()
    libuv = hasattr(TCPStore, "clone")  # before it could be cloned, torch's newer server took no socket of others
    return TCPStore(
        host, port, size, True, timeout, wait_for_workers=wait, master_listen_fd=descriptor, use_libuv=libuv
    )


def listen(host: str, port: int) -> socket.socket | None:
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


def own_address(towards: str) -> str:
    """The address of this host's interface from which `towards` is reached; 127.0.0.1 where that is this host.

    Nothing is sent: connecting a datagram socket only asks the routing table.
    """
    try:
        found = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(where)
            own = str(sock.getsockname()[0])
    except (OSError, UnicodeError) as error:  # the latter: no name of a host
        raise UnsupportedError(f"there is no way from here to {towards!r}: {error}; name an address") from error
    return LOOPBACK if _is_loopback(own) and family == socket.AF_INET else own


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False

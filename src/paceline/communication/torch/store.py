# SPDX-License-Identifier: Apache-2.0
"""Addresses of this host, and torch's store, listening at one of them only.

By itself torch's store listens at every interface of the host, even if it is given an address, and is neither encrypted
nor authenticated. So its socket is made here.
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from paceline.core import runtime
from paceline.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
BACKLOG = 2048  # workers connect all at once


def open_store(host: str, port: int, timeout: timedelta, size: int | None = None, wait: bool = False) -> TCPStore:
    """Open the store at an address of this host.

    Args:
        host: a name or an address of this host that other workers reach.
        port: 0 for any; the store has it as `port`.
        timeout: of its operations.
        size: number of its clients, if known.
        wait: for all of them to connect.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # here, for `paceline run --print`

    listener = listen(host, port)
    if listener is None:
        return TCPStore(host, port, size, True, timeout, wait_for_workers=wait)
    port, descriptor = listener.getsockname()[1], listener.detach()
    libuv = hasattr(TCPStore, "clone")  # before that version, libuv's server accepts no given socket
    return TCPStore(
        host, port, size, True, timeout, wait_for_workers=wait, master_listen_fd=descriptor, use_libuv=libuv
    )


def listen(host: str, port: int) -> socket.socket | None:
    """A socket at the one address that `host` names; None if that is no address of this host that others reach.

    For example behind a router with port forwarding, or if a host resolves its own name to a loopback address. Then
    torch's store listens at every interface.
    """
    candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, _, _, _, where in sorted(candidates, key=lambda entry: entry[0] != socket.AF_INET):
        if is_loopback(str(where[0])) and not is_local(host):
            continue
        try:
            return socket.create_server((str(where[0]), port), family=family, backlog=BACKLOG)
        except OSError:  # no address of this host, or the port is taken: torch has the better error
            continue
    return None


def is_local(host: str) -> bool:
    """Whether this name means the local host on every host."""
    return host == "localhost" or is_loopback(host)


def own_address(towards: str) -> str:
    """The address of this host's interface that leads to `towards`; 127.0.0.1 if that is this host.

    Nothing is sent: connecting a datagram socket only looks up the route.
    """
    simulated = runtime.host()
    if simulated is not None:
        return simulated[1]
    try:
        candidates = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, where = min(candidates, key=lambda entry: entry[0] != socket.AF_INET)
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(where)
            own = str(sock.getsockname()[0])
    except (OSError, UnicodeError) as error:  # the latter: not a host name
        raise UnsupportedError(f"there is no way from here to {towards!r}: {error}; name an address") from error
    return LOOPBACK if is_loopback(own) and family == socket.AF_INET else own


def is_loopback(host: str) -> bool:
    """Whether it is an address of the loopback interface."""
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False

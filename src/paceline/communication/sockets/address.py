# SPDX-License-Identifier: Apache-2.0
"""The address at which the other workers reach this worker's listener."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

from paceline.communication.torch import rendezvous
from paceline.communication.torch.store import own_address
from paceline.core.world import World
from paceline.errors import UnsupportedError

LOOPBACK = "127.0.0.1"


def find_address(world: World, gather: Callable[[str], list[Any]]) -> str:
    """The address of this host's interface that leads to the workers' store.

    The store's host may resolve its own name to a loopback address. If other workers have a real address, it uses the
    interface that leads to them.

    Args:
        world: this worker, with all hosts.
        gather: given this worker's value, returns all workers' values in rank order.
    """
    hosts = [host for host in dict.fromkeys(world.hosts) if host != world.host]
    try:
        own = own_address(rendezvous.address() or (hosts[0] if hosts else LOOPBACK))
    except UnsupportedError as error:
        if hosts:
            raise UnsupportedError(
                world.sign(f"{error}; set MASTER_ADDR to an address of rank 0's host that all workers reach")
            ) from error
        own = LOOPBACK
    others = [str(one) for one in gather(own) if not _is_loopback(str(one))]
    return own_address(others[0]) if _is_loopback(own) and others else own


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback

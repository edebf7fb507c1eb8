# SPDX-License-Identifier: Apache-2.0
"""How the workers of a launcher, or of a group of the user's, find each other's doors: over the store where they met.

Nothing of torch.distributed but its store is used, and that only here: no group is made where the user has made none.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.communication.base import SoloTransport, Transport, world_within
from paceline.communication.ring.listener import RingListener
from paceline.communication.ring.transport import RingTransport
from paceline.communication.schedulers import LAUNCHER_VARIABLES
from paceline.communication.sockets.address import find_address
from paceline.communication.sockets.channel import TLS
from paceline.communication.torch import rendezvous
from paceline.communication.torch.groups import first_line
from paceline.communication.torch.transport import fresh_name
from paceline.core.world import World, host_name
from paceline.errors import PeerLostError, UnsupportedError

ADDRESS_BYTES = 4096
"""What one worker says of itself, at most."""

_met: list[Any] = []  # the launcher's store and this worker's place: it can be made once, and must stay

Tell = Callable[[str, Any], list[Any]]
"""Given a word for the subject and this worker's value, the values of all, in rank order."""


class OwnDoor(RingTransport):
    """A ring with a door of its own, which closes with it."""

    def __init__(self, door: RingListener, *about: Any) -> None:
        self._door = door
        super().__init__(door, *about)

    def close(self) -> None:
        super().close()
        self._door.close()


def meet(timeout_s: float, group: dist.ProcessGroup | None = None, tls: TLS | None = None) -> Transport:
    """The ring of the processes of `group`, or of all that the launcher has started.

    Args:
        timeout_s: deadline of the meeting, and of every operation later.
        group: of the user's; None for all processes.
        tls: certificates; None for connections in the clear.

    Raises:
        PeerLostError: somebody did not come.
        UnsupportedError: there is neither a group nor a launcher, or no way from here to the others.
    """
    store, rank, size, name = _place(timeout_s, group)
    if size == 1:
        return SoloTransport(World())
    world = World(rank, size, 0, 1, host_name())

    def tell(subject: str, value: Any) -> list[Any]:
        return _tell(store, f"paceline/ring/{name}/{subject}", world, value, timeout_s)

    world = World(rank, size, 0, 1, world.host, tuple(str(host) for host in tell("host", world.host)))
    world = world_within(world, range(size))
    door = RingListener(find_address(world, lambda own: tell("address", own)), tls)
    try:
        addresses = [(str(address), int(port)) for address, port in tell("door", [door.address, door.port])]
        return OwnDoor(door, name, world, addresses, timeout_s, tls)
    except BaseException:
        door.close()
        raise


def _place(timeout_s: float, group: dist.ProcessGroup | None) -> tuple[Any, int, int, str]:
    """The store, this worker's rank and the number of workers, and a name that is new on all of them."""
    if dist.is_initialized():
        name = fresh_name(dist.get_process_group_ranks(group or dist.group.WORLD))
        return dist.distributed_c10d._get_default_store(), dist.get_rank(group), dist.get_world_size(group), name
    worker = rendezvous.found()
    if worker is None:
        raise UnsupportedError(
            f'transport="channel" needs a launcher or a group, and {", ".join(LAUNCHER_VARIABLES)} are not all set; '
            "start with `paceline run` or `torchrun`, or call torch.distributed.init_process_group before attach"
        )
    if not _met and worker.env:
        meetings = dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
        _met.extend(next(iter(meetings)))
    elif not _met:
        _met.extend((rendezvous.store(worker, timeout_s), worker.rank, worker.size))
    store, rank, size = _met
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store, rank, size, f"{fresh_name(list(range(size)))}.{attempt}"


def _tell(store: Any, place: str, world: World, value: Any, timeout_s: float) -> list[Any]:
    """Every worker's value, in rank order, over the store."""
    until = time.monotonic() + timeout_s
    store.set(f"{place}/{world.rank}", json.dumps(value))
    found = []
    for rank in range(world.size):
        key = f"{place}/{rank}"
        try:
            store.wait([key], timedelta(seconds=max(0.001, until - time.monotonic())))
            text = store.get(key)
        except RuntimeError as error:
            absent = [
                other for other in range(rank, world.size) if other != world.rank and not _there(store, place, other)
            ]
            who = world.names(absent) if absent else "the store where the workers met"
            raise PeerLostError(
                world.sign(f"{who} did not come to the meeting within {timeout_s:g} s: {first_line(error)}")
            ) from error
        if len(text) > ADDRESS_BYTES:
            raise UnsupportedError(world.sign(f"{world.name(rank)} says {len(text)} bytes of itself at {place}"))
        found.append(json.loads(text))
    return found


def _there(store: Any, place: str, rank: int) -> bool:
    try:
        return bool(store.check([f"{place}/{rank}"]))
    except RuntimeError:
        return True

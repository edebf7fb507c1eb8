# SPDX-License-Identifier: Apache-2.0
"""How the workers of a launcher, or of a user's group, exchange the addresses of their listeners: over their store.

Nothing of torch.distributed but its store is used, and that only here; no process group is made.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.communication.base import SoloTransport, Transport, world_within
from paceline.communication.ring.listener import RingListener
from paceline.communication.ring.transport import RingTransport
from paceline.communication.ring.wire import Address
from paceline.communication.sockets.channel import TLS
from paceline.communication.sockets.identity import rank_role
from paceline.communication.torch import rendezvous
from paceline.communication.torch.groups import first_line
from paceline.communication.torch.rendezvous import find_address
from paceline.communication.torch.transport import fresh_name
from paceline.core import runtime
from paceline.core.world import World, host_name
from paceline.errors import PeerLostError, UnsupportedError

ADDRESS_BYTES = 4096
"""Most bytes that a worker publishes."""

_met: list[Any] = []  # the launcher's store, rank and size: it can be made once, and must stay


def meet(timeout_s: float, group: dist.ProcessGroup | None = None, tls: TLS | None = None) -> Transport:
    """The ring of the processes of `group`, or of all processes of the launcher.

    Args:
        timeout_s: deadline of the meeting, and of every later operation.
        group: the user's; None for all processes.
        tls: certificates; None for unencrypted connections.

    Raises:
        PeerLostError: a worker did not come.
        UnsupportedError: there is neither a group nor a launcher, or no route to the other workers.
    """
    store, rank, ranks, name = _place(timeout_s, group)
    size = len(ranks)
    if size == 1:
        return SoloTransport(World())
    world = World(rank, size, 0, 1, host_name())

    def share(subject: str, value: Any) -> list[Any]:
        return _share(store, f"paceline/ring/{name}/{subject}", world, value, timeout_s)

    world = World(rank, size, 0, 1, world.host, tuple(str(host) for host in share("host", world.host)))
    world = world_within(world, range(size))
    listener = RingListener(find_address(world, lambda own: share("address", own)), tls)
    try:
        published = share("listener", [listener.address, listener.port])
        addresses = [
            Address(str(one), int(port), rank_role(other)) for (one, port), other in zip(published, ranks, strict=True)
        ]
        return RingTransport(listener, name, world, addresses, timeout_s, tls, owns_listener=True)
    except BaseException:
        listener.close()
        raise


def _place(timeout_s: float, group: dist.ProcessGroup | None) -> tuple[Any, int, list[int], str]:
    """The store, this worker's rank, the launcher's rank of each member, and a name that is new on all of them."""
    if dist.is_initialized():
        ranks = list(dist.get_process_group_ranks(group or dist.group.WORLD))
        return dist.distributed_c10d._get_default_store(), dist.get_rank(group), ranks, fresh_name(ranks)
    worker = rendezvous.required_worker('transport="channel"')
    if not _met and worker.env:
        meetings = dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
        _met.extend(next(iter(meetings)))
    elif not _met:
        _met.extend((rendezvous.store(worker, timeout_s), worker.rank, worker.size))
    store, rank, size = _met
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    ranks = list(range(size))
    return store, rank, ranks, f"{fresh_name(ranks)}.{attempt}"


def _share(store: Any, place: str, world: World, value: Any, timeout_s: float) -> list[Any]:
    """Publish `value` in the store; returns every worker's, in rank order."""
    until = runtime.monotonic() + timeout_s
    store.set(f"{place}/{world.rank}", json.dumps(value))
    values = []
    for rank in range(world.size):
        key = f"{place}/{rank}"
        try:
            store.wait([key], timedelta(seconds=max(0.001, until - runtime.monotonic())))
            text = store.get(key)
        except RuntimeError as error:
            others = (other for other in range(rank, world.size) if other != world.rank)
            absent = [other for other in others if not _there(store, place, other)]
            who = world.names(absent) if absent else "the store where the workers met"
            raise PeerLostError(
                world.sign(f"{who} did not come to the meeting within {timeout_s:g} s: {first_line(error)}")
            ) from error
        if len(text) > ADDRESS_BYTES:
            raise UnsupportedError(world.sign(f"{world.name(rank)} says {len(text)} bytes of itself at {place}"))
        values.append(json.loads(text))
    return values


def _there(store: Any, place: str, rank: int) -> bool:
    try:
        return bool(store.check([f"{place}/{rank}"]))
    except RuntimeError:
        return True

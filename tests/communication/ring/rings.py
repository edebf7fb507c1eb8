# SPDX-License-Identifier: Apache-2.0
"""Rings of threads in one process, for the tests of what goes around in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.communication.ring import RingListener, RingTransport
from paceline.communication.sockets.channel import TLS
from paceline.core.world import World
from tests.communication.connections import HERE, SOON


def world_of(rank: int, size: int) -> World:
    """Rank `rank` of workers on hosts h0, h1, and so on."""
    return World(rank, size, 0, 1, f"h{rank}", tuple(f"h{k}" for k in range(size)))


@contextlib.contextmanager
def listeners(number: int, tls: Sequence[TLS | None] | None = None) -> Iterator[list[RingListener]]:
    """So many listeners of this host."""
    with contextlib.ExitStack() as stack:
        made = []
        for rank in range(number):
            made.append(RingListener(HERE, tls[rank] if tls else None))
            stack.callback(made[-1].close)
        yield made


@contextlib.contextmanager
def ring(
    size: int, timeout_s: float = SOON, tls: Sequence[TLS | None] | None = None, label: str = "job/1"
) -> Iterator[list[RingTransport]]:
    """The connections of `size` workers, one each."""
    with listeners(size, tls) as opened:
        places = [(listener.address, listener.port) for listener in opened]
        made = [
            RingTransport(listener, label, world_of(rank, size), places, timeout_s)
            for rank, listener in enumerate(opened)
        ]
        try:
            yield made
        finally:
            for one in made:
                one.close()


def everywhere(members: Sequence[RingTransport], body: Callable[[RingTransport], Any]) -> list[Any]:
    """`body` on every worker at the same time; results in rank order, and errors as results."""

    def safely(one: RingTransport) -> Any:
        try:
            return body(one)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(safely, members))

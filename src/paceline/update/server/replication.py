# SPDX-License-Identifier: Apache-2.0
"""An owner's replicas at its successor: when a shard is sent, and which pushes are safe there.

The successor is the next live worker in rank order. It acknowledges each replica, and only then the pushes in it are
safe: their senders learn so with the answer to their next push, or at once where they asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from paceline.core import runtime
from paceline.update.server.owner import ShardServer

Send = Callable[[int, int, dict[str, Any], Tensor], None]
"""(shard, number of the replica, about, row)"""


class SafePush(NamedTuple):
    """The owner and its successor have all pushes of `sender` to `shard` up to `number`."""

    sender: int
    shard: int
    number: int


class InFlight(NamedTuple):
    """A replica on its way: its number, its receiver, and the number of each sender's last push in it."""

    number: int
    successor: int
    applied: dict[int, int]


class Replicas:
    """The replicas of one owner's shards.

    Args:
        server: the shards.
        every: pushes of one sender after which a shard is replicated.
        successor: gives the worker that would take over the shards; None where this worker is alone.
        send: sends a replica to the successor.
    """

    def __init__(self, server: ShardServer, every: int, successor: Callable[[], int | None], send: Send) -> None:
        self._server, self._every, self._successor, self._send = server, every, successor, send
        self._lock = runtime.RLock()
        self._number = 0
        self._sent: dict[int, dict[int, int]] = {}  # shard -> what was in its last replica
        self._in_flight: dict[int, InFlight] = {}  # by shard
        self._safe: dict[int, dict[int, int]] = {}
        self._wanted: dict[int, set[int]] = {}

    def pushed(self, shard: int) -> None:
        """Replicate a shard if it is due after a push; different shards at different pushes."""
        applied = self._server.shards[shard].numbered.applied
        sent = self._sent.get(shard)
        every = self._every if sent is not None else 1 + shard % self._every
        before = sent or {}
        if any(number - before.get(sender, 0) >= every for sender, number in applied.copy().items()):
            self.replicate(shard)

    def replicate(self, shard: int) -> None:
        """Send a replica now, unless one is on its way."""
        with self._lock:
            successor = self._successor()
            if successor is None or shard in self._in_flight:
                return
            about, row = self._server.shards[shard].snapshot()
            applied = {sender: number for sender, number in about["numbered"]["applied"]}
            self._number += 1
            self._sent[shard] = applied
            self._in_flight[shard] = InFlight(self._number, successor, applied)
            self._send(shard, self._number, about, row)

    def kept(self, successor: int, shard: int, number: int) -> list[SafePush]:
        """Note that the successor has replica `number` of a shard; what to tell which senders."""
        with self._lock:
            in_flight = self._in_flight.get(shard)
            if in_flight is None or in_flight[:2] != (number, successor):
                return []
            del self._in_flight[shard]
            self._safe[shard] = in_flight.applied
            return self._told(shard)

    def want(self, sender: int) -> list[SafePush]:
        """Note that a sender waits until its pushes are safe; what to tell it at once."""
        with self._lock:
            found = []
            for shard in list(self._server.shards):
                self._wanted.setdefault(shard, set()).add(sender)
                found += self._told(shard)
            return found

    def _told(self, shard: int) -> list[SafePush]:
        """What to tell the senders that wait for this shard; replicate again where a push is not safe."""
        applied, again = self._server.shards[shard].numbered.applied, False
        found: list[SafePush] = []
        for sender in sorted(self._wanted.get(shard, ())):
            safe = self.safe(shard, sender)
            found.append(SafePush(sender, shard, safe))
            if safe >= applied.get(sender, 0):
                self._wanted[shard].discard(sender)
            else:
                again = True
        if again:
            self.replicate(shard)
        return found

    def safe(self, shard: int, sender: int) -> int:
        """The number of the sender's last push that the successor has; of its last push where there is no successor."""
        if self._successor() is None:
            return self._server.shards[shard].numbered.applied.get(sender, 0)
        return self._safe.get(shard, {}).get(sender, 0)

    def renew(self, shards: Iterable[int]) -> None:
        """Send replicas of these shards at once: the former ones are lost or out of date."""
        with self._lock:
            for shard in shards:
                self._in_flight.pop(shard, None)
                self._safe.pop(shard, None)
                self._sent.pop(shard, None)
                self.replicate(shard)

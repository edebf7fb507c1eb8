# SPDX-License-Identifier: Apache-2.0
"""This worker's requests to the owners of shards, and their answers."""

from __future__ import annotations

from typing import Any

from paceline.core import runtime
from paceline.update.server.context import ServiceContext
from paceline.update.server.durability import Durability
from paceline.update.server.frames import FrameKind
from paceline.update.server.ledger_client import SocketLedgerClient
from paceline.update.server.peer import Peers
from paceline.update.server.protocol import Once, PendingExchange, ShardRequest, Timers


class Exchanges:
    """The exchanges of a worker that are under way.

    Attributes:
        timers: send delayed pulls.
    """

    def __init__(
        self, context: ServiceContext, peers: Peers, durability: Durability, ledger_client: SocketLedgerClient
    ) -> None:
        self._context, self._peers, self._durability, self._ledger_client = context, peers, durability, ledger_client
        self.timers = Timers()
        self._pending: dict[int, PendingExchange] = {}
        self._clocks: dict[int, int] = {}  # shard -> the clock of this worker's last push to it

    def start(self, pending: PendingExchange) -> None:
        """Queue every request at its owner's connection; only the training thread calls this."""
        if pending.clock:
            self._ledger_client.idle = False
            self._durability.keep(pending)
        self._send(pending)
        self._ledger_client.report()  # after the push, whose samples this worker no longer holds

    def start_later(self, pending: PendingExchange, after_s: float) -> Once:
        """Start the exchange in `after_s` seconds, or earlier when the returned function is called."""
        once = Once(lambda: self._send(pending))
        if after_s > 0:
            self.timers.put(after_s, once)
        else:
            once()
        return once

    def _send(self, pending: PendingExchange) -> None:
        self._context.check()
        with self._context.changed:
            pending.requested_at = runtime.monotonic()
            self._pending[pending.number] = pending
            by_owner: dict[int, list[ShardRequest]] = {}
            for request in pending.requests:
                if request.values is not None:
                    self._clocks[request.shard] = pending.clock
                by_owner.setdefault(self._context.membership.owners[request.shard], []).append(request)
            for owner, requests in by_owner.items():
                self._peers[owner].request(pending, *requests)
            self._peers.remind()

    def find(self, number: int) -> PendingExchange | None:
        """The exchange of that number, while it is under way."""
        return self._pending.get(number)

    def answered(self, number: int, shard: int, version: int, delay: int, news: Any, rank: int) -> None:
        """Note an answer of worker `rank`, whose values have been received.

        Ignore late answers of a lost worker: its successor got the same request, and the successor's first answer
        brings the whole ledger, which must not be missed.
        """
        with self._context.changed:
            pending = self._pending.get(number)
            if pending is None or rank in self._context.membership.lost:
                return
            pending.answered(shard, version, delay, news)
            if pending.done:
                pending.answered_at = runtime.monotonic()
                del self._pending[number]
                self._context.changed.notify_all()

    def request_again(self, moved: set[int]) -> None:
        """Send the new owner of a lost worker's shards what its replicas may lack, and this worker's clock.

        The replica is older than the lost owner's state. Without the clock the new owner would hold back other workers
        for this one, although it is ahead of them and waits for them.
        """
        if not moved:
            return
        successor = self._context.membership.owners[min(moved)]
        waiting = {(pending.number, request.shard) for pending in self._pending.values() for request in pending.waiting}
        pushed = set()
        for pending, request in self._durability.again(moved, waiting):
            self._peers[successor].request(pending, request)
            pushed.add(request.shard)
        for pending in list(self._pending.values()):
            for request in pending.waiting:
                if request.shard in moved and request.values is None:
                    self._peers[successor].request(pending, request)
        clocks = [[shard, self._clocks[shard]] for shard in sorted(moved - pushed) if shard in self._clocks]
        if successor == self._context.membership.rank:
            self._context.server.tick(successor, clocks)
        elif clocks:
            self._peers[successor].say(FrameKind.CLOCKS, (), note=clocks)
        self._ledger_client.idle_again()

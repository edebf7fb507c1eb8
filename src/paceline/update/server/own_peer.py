# SPDX-License-Identifier: Apache-2.0
"""A worker's requests to itself: they go over no wire, and the training thread does not wait for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.communication.sockets.channel import Frame
from paceline.update.server.frames import LEDGER, FrameKind
from paceline.update.server.parts import ServiceParts
from paceline.update.server.peer import SendQueue
from paceline.update.server.protocol import PendingExchange, ShardRequest
from paceline.update.server.shard import NO_READER


class OwnPeer(SendQueue):
    """Answers this worker's own requests, in order, in a thread."""

    def __init__(self, parts: ServiceParts) -> None:
        super().__init__(parts.context.membership.rank)
        self._parts = parts
        self._held: list[tuple[PendingExchange, ShardRequest, int]] = []  # pushes whose answers have to wait
        parts.context.watchers.append(lambda: self._put(self._release) if self._held else None)

    def run(self) -> None:
        """Answer until it is closed."""
        while not self._over:
            self._queue.get()()

    def _send(self, pending: PendingExchange, request: ShardRequest) -> None:
        rank, shard, delay = self.rank, request.shard, 0
        shards, durability = self._parts.shards, self._parts.durability
        if request.values is not None:
            answer = shards.push(shard, request.values, pending.incoming(rank, request), request.out)
            delay = answer.delay
            if not answer.may_start:  # what this worker says next must not wait for that
                self._held.append((pending, request, delay))
                self._put(self._release)  # clocks may have changed before it was held
                durability.applied(shard)
                return
        self._answer(pending, request, delay)
        if request.values is not None:
            durability.applied(shard)

    def _release(self) -> None:
        """Answer the pushes after which this worker may go on."""
        self._held = [one for one in self._held if not self._released(*one)]

    def _released(self, pending: PendingExchange, request: ShardRequest, delay: int) -> bool:
        if self._parts.shards.held_back(request.shard, self.rank):
            return False
        self._answer(pending, request, delay)
        return True

    def _answer(self, pending: PendingExchange, request: ShardRequest, delay: int) -> None:
        rank, shard = self.rank, request.shard
        server, durability = self._parts.context.server, self._parts.durability
        reader = NO_READER if pending.peeks else rank
        version = server.read(shard, reader, request.out, after_push=request.values is not None)
        durability.safe(rank, [(shard, *durability.up_to(shard, rank))])
        self._parts.exchanges.answered(pending.number, shard, version, delay, None, rank)

    def _write(self, kind: FrameKind, numbers: tuple[int, ...], body: Tensor | None, note: Any) -> None:
        """Handle the only frames that a worker sends itself: to its shards' clocks and to the ledger that it keeps."""
        if kind == FrameKind.IDLE:
            self._parts.shards.idle(self.rank)
        elif kind in LEDGER:
            self._parts.ledger_client.handle(self.rank, None, Frame(kind, numbers, None, note))

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

    def run(self) -> None:
        """Answer until it is closed."""
        while not self._over:
            self._queue.get()()

    def _send(self, pending: PendingExchange, request: ShardRequest) -> None:
        rank, shard, delay = self.rank, request.shard, 0
        server, shards, durability = self._parts.context.server, self._parts.shards, self._parts.durability
        if request.values is not None:
            answer = shards.push(shard, request.values, pending.incoming(rank, request), request.out)
            delay = answer.delay
            while not answer.may_start and shards.held_back(shard, rank):
                pass
        reader = NO_READER if pending.peeks else rank
        version = server.read(shard, reader, request.out, after_push=request.values is not None)
        durability.safe(rank, [(shard, durability.up_to(shard, rank))])
        self._parts.exchanges.answered(pending.number, shard, version, delay, None, rank)
        if request.values is not None:
            durability.applied(shard)

    def _write(self, kind: FrameKind, numbers: tuple[int, ...], body: Tensor | None, note: Any) -> None:
        """Handle the only frames that a worker sends itself: to its shards' clocks and to the ledger that it keeps."""
        if kind == FrameKind.IDLE:
            self._parts.shards.idle(self.rank)
        elif kind in LEDGER:
            self._parts.ledger_client.handle(self.rank, None, Frame(kind, numbers, None, note))

# SPDX-License-Identifier: Apache-2.0
"""Handles the frames that owners send back over the connections that this worker made."""

from __future__ import annotations

from torch import Tensor

from paceline.communication.sockets.channel import Frame, FrameHeader
from paceline.update.server.frames import FrameKind
from paceline.update.server.parts import ServiceParts
from paceline.update.server.peer import fresh


class AnswerHandler:
    """Handles the answers of all peers."""

    def __init__(self, parts: ServiceParts) -> None:
        self._parts = parts

    def place(self, rank: int, header: FrameHeader) -> Tensor:
        """Memory for a frame's body: the destination of the exchange that awaits it, if one does."""
        awaited = header.kind == FrameKind.ANSWER and rank not in self._parts.context.membership.lost
        pending = self._parts.exchanges.find(header.numbers[3]) if awaited else None
        request = pending.request(header.numbers[0]) if pending is not None else None
        return request.out if request is not None and request.out is not None else fresh(header)

    def take(self, rank: int, frame: Frame) -> None:
        """Handle a frame of worker `rank`."""
        parts = self._parts
        if frame.kind == FrameKind.OUT:
            parts.failures.told(frame.numbers[0], str(frame.note), bool(frame.numbers[1]))
        elif frame.kind == FrameKind.ANSWER:
            shard, version, delay, number, *safe = frame.numbers[:6]
            parts.durability.safe(rank, [(shard, *safe)])
            parts.exchanges.answered(number, shard, version, delay, frame.note, rank)
        elif frame.kind == FrameKind.KEPT:
            parts.durability.replica_kept(*frame.numbers[:2])
        elif frame.kind == FrameKind.LEASED:
            parts.ledger_client.answered(frame.numbers)

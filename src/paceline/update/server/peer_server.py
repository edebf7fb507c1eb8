# SPDX-License-Identifier: Apache-2.0
"""What a worker does with the frames of others and its own: serves their requests, takes their answers.

One thread for each other worker takes its requests in order, and answers them. A worker's requests to itself go over no
wire, and the training thread does not wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.communication.sockets.channel import Channel, Frame, FrameHeader
from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark
from paceline.errors import MismatchError, PeerLostError
from paceline.update.server.barriers import Barriers
from paceline.update.server.context import ServiceContext
from paceline.update.server.durability import Durability
from paceline.update.server.exchanges import Exchanges
from paceline.update.server.failures import Failures
from paceline.update.server.frames import BACKGROUND, LEDGER, FrameKind, check
from paceline.update.server.ledger_client import SocketLedgerClient
from paceline.update.server.membership import LOOK_EVERY_S
from paceline.update.server.peers import Peers, SendQueue, fresh
from paceline.update.server.protocol import PendingExchange, ShardRequest
from paceline.update.server.shard import NO_READER
from paceline.update.server.shard_service import ShardService
from paceline.update.server.shard_updates import GroupSettings, IncomingPush


@dataclass(frozen=True)
class ServiceParts:
    """The parts of one service; `exchanges` are this worker's requests, `shards` serves those of other workers."""

    context: ServiceContext
    peers: Peers
    failures: Failures
    durability: Durability
    ledger_client: SocketLedgerClient
    exchanges: Exchanges
    shards: ShardService
    barriers: Barriers


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


class _Buffers:
    """Reused buffers of one thread: the first write to new memory costs more than the network."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype, str], Tensor] = {}

    def like(self, anchor: Tensor, use: str) -> Tensor:
        key = (anchor.numel(), anchor.dtype, use)
        if key not in self._kept:
            self._kept[key] = torch.zeros_like(anchor)
        return self._kept[key]


@dataclass(frozen=True)
class _Held:
    """A push whose answer has to wait: its shard, its delay, its exchange, and memory for the values, if wanted."""

    shard: int
    delay: int
    pending: int
    out: Tensor | None


class PeerServer:
    """Answers worker `rank` over the connection that it made, until it leaves; `run` is the body of a thread."""

    def __init__(self, parts: ServiceParts, rank: int, channel: Channel) -> None:
        self._parts, self._context, self._rank, self._channel = parts, parts.context, rank, channel
        self._server, self._members = parts.context.server, parts.context.membership
        self._buffers, self._settings = _Buffers(), dict[int, GroupSettings]()
        self._marks: tuple[int, list[Mark]] = (0, [])  # an exchange, and the sample ranges of its pushes
        self._held: list[_Held] = []  # answers that have to wait for slower workers
        self._waker = channel.waker()
        self._said = 0.0
        parts.context.watchers.append(lambda: self._waker.wake() if self._held else None)

    def run(self) -> None:
        """Handle frames until the connection ends."""
        try:
            while not self._context.closed.is_set():
                if self._held:
                    ready = self._channel.wait(self._waker)
                    self._release()
                    if not ready:
                        continue
                frame = self._receive()
                if self._rank in self._members.lost:
                    return
                if frame.kind not in BACKGROUND:
                    self._members.acted[self._rank] = runtime.monotonic()
                self._handle(frame)
        except PeerLostError as error:
            self._parts.failures.connection_ended(self._rank, str(error))
        finally:
            self._held.clear()
            self._waker.close()

    def _receive(self) -> Frame:
        """The next frame; one that no worker sends ends the connection, and with it its sender."""
        try:
            frame = self._channel.receive(self._place)
            check(frame, self._context.world.size)
        except MismatchError as error:
            self._channel.close()
            raise PeerLostError(f"what {self._context.world.name(self._rank)} sent makes no sense: {error}") from error
        return frame

    def _place(self, header: FrameHeader) -> Tensor:
        if header.kind != FrameKind.PUSH:
            return fresh(header)
        return self._buffers.like(self._anchor(header.numbers[0]), "in")

    def _anchor(self, shard: int) -> Tensor:
        if shard not in self._server.shards:
            raise MismatchError(
                self._context.world.sign(f"was asked for shard {shard}, which belongs to another worker")
            )
        return self._server.shards[shard].anchor

    def _handle(self, frame: Frame) -> None:
        parts, numbers = self._parts, frame.numbers
        if frame.kind == FrameKind.SETTINGS:
            self._settings[numbers[0]] = frame.note
        elif frame.kind == FrameKind.MARKS:
            self._marks = numbers[0], frame.note
        elif frame.kind == FrameKind.PUSH:
            self._take_push(frame)
        elif frame.kind == FrameKind.PULL:
            shard, pending, peeks = numbers[:3]
            out = self._buffers.like(self._anchor(shard), "out")
            version = self._server.read(shard, NO_READER if peeks else self._rank, out, after_push=False)
            self._answer(shard, version, 0, pending, out)
        elif frame.kind == FrameKind.REPLICA:
            assert frame.body is not None
            self._server.keep_replica(frame.note, frame.body)
            self._context.send(self._channel, FrameKind.KEPT, numbers[:2])
        elif frame.kind == FrameKind.SECURE:
            parts.durability.wanted(self._rank)
        elif frame.kind == FrameKind.SAFE:
            parts.durability.safe(self._rank, frame.note)
        elif frame.kind == FrameKind.CLOCKS:
            parts.shards.tick(self._rank, frame.note)
        elif frame.kind == FrameKind.OUT:
            parts.failures.told(numbers[0], str(frame.note), bool(numbers[1]))
            parts.ledger_client.partial.told(self._rank, numbers[0])
        elif frame.kind in LEDGER:
            parts.ledger_client.handle(self._rank, self._channel, frame)
        elif frame.kind == FrameKind.IDLE:
            parts.shards.idle(self._rank)
        elif frame.kind in (FrameKind.FINISH, FrameKind.BYE, FrameKind.HERE):
            parts.barriers.arrived(self._rank, frame.kind, numbers[0])

    def _take_push(self, frame: Frame) -> None:
        shard, clock, version, minibatches, pending, span, answered_with_values = frame.numbers[:7]
        assert frame.body is not None
        marks = self._marks[1] if self._marks[0] == pending else ()
        incoming = IncomingPush(self._rank, clock, version, minibatches, self._settings.get(span, {}), marks)
        out = self._buffers.like(frame.body, "out") if answered_with_values else None
        answer = self._parts.shards.push(shard, frame.body, incoming, out)
        if answer.may_start:
            self._answer_push(_Held(shard, answer.delay, pending, out))
        else:  # frames that come after this one must not wait for that
            self._said = runtime.monotonic() if not self._held else self._said
            keeps = out is not None and self._server.reads_before
            self._held.append(_Held(shard, answer.delay, pending, out.clone() if keeps and out is not None else out))
            self._waker.wake()  # clocks may have changed before it was held
        self._parts.durability.applied(shard)

    def _answer_push(self, held: _Held) -> None:
        version = self._server.read(held.shard, self._rank, held.out, after_push=True)
        self._answer(held.shard, version, held.delay, held.pending, held.out)

    def _answer(self, shard: int, version: int, delay: int, pending: int, out: Tensor | None) -> None:
        safe = self._parts.durability.up_to(shard, self._rank)
        news = self._server.news(shard, self._rank)
        self._context.send(self._channel, FrameKind.ANSWER, (shard, version, delay, pending, *safe), out, news)

    def _release(self) -> None:
        """Answer the pushes after which the worker may go on; send it signs of life while it has to wait."""
        self._waker.clear()
        self._held = [one for one in self._held if not self._released(one)]
        if self._held:
            self._members.acted[self._rank] = now = runtime.monotonic()  # its program waits for this worker
            if now - self._said > LOOK_EVERY_S:
                self._context.send(self._channel, FrameKind.STILL_HERE, (self._held[0].shard,))
                self._said = now

    def _released(self, held: _Held) -> bool:
        if self._parts.shards.held_back(held.shard, self._rank):
            return False
        self._answer_push(held)
        return True

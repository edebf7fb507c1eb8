# SPDX-License-Identifier: Apache-2.0
"""A worker's connections to the others: requests in order, their answers, and waits that keep the connections alive."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from paceline.communication.sockets.channel import Channel, Frame, FrameHeader
from paceline.communication.sockets.frames import Outgoing
from paceline.core import runtime
from paceline.errors import PeerLostError
from paceline.update.server.membership import LOOK_EVERY_S, ServiceContext
from paceline.update.server.protocol import FrameKind, PendingExchange, ShardRequest
from paceline.update.server.shard import GroupSettings

BATCH = 64
"""Frames that are sent together, at most: Python takes half the time for what it does many times over."""


class SendQueue(ABC):
    """Frames and requests to worker `rank`, which a thread sends in order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._queue: SimpleQueue[Callable[[], None]] = runtime.SimpleQueue()
        # when a frame was last queued; when this worker's program queued one, without heartbeats
        self.spoke_at = self.said_at = self._since = runtime.monotonic()
        self._open, self._counting = 0, runtime.Lock()
        self._over, self._left = False, runtime.Event()

    def request(self, pending: PendingExchange, *requests: ShardRequest) -> None:
        """Queue requests for shards."""
        self._opened(len(requests))
        for request in requests:
            self._queue.put(partial(self._send, pending, request))
        self._wake()

    def inquire(self, kind: FrameKind, numbers: tuple[int, ...]) -> None:
        """Queue a request that is only numbers, and whose answer is."""
        self._opened(1)
        self._put(lambda: self._write(kind, numbers, None, None))

    def say(self, kind: FrameKind, numbers: tuple[int, ...], body: Tensor | None = None, note: Any = None) -> None:
        """Queue a frame that has no answer."""
        self.spoke_at = self.said_at = runtime.monotonic()
        self._put(lambda: self._write(kind, numbers, body, note))

    def beat(self) -> None:
        """Queue a heartbeat: the process lives, whatever its program does."""
        self.spoke_at = runtime.monotonic()
        self._put(lambda: self._write(FrameKind.ALIVE, (), None, None))

    def flush(self, timeout_s: float) -> None:
        """Wait until everything queued is sent; once, at the end."""
        self._put(self._all_left)
        self._left.wait(timeout_s)

    def _all_left(self) -> None:
        self._left.set()

    def _opened(self, count: int) -> None:
        self.spoke_at = self.said_at = runtime.monotonic()
        with self._counting:
            if self._open == 0:
                self._since = runtime.monotonic()
            self._open += count

    def _put(self, send: Callable[[], None]) -> None:
        self._queue.put(send)
        self._wake()

    def _wake(self) -> None:  # noqa: B027
        """Called when something has been queued."""

    def close(self) -> None:
        """End the thread."""
        self._over = True
        self._put(lambda: None)

    @abstractmethod
    def run(self) -> None:
        """The body of its thread."""

    @abstractmethod
    def _send(self, pending: PendingExchange, request: ShardRequest) -> None:
        """Send one request."""

    @abstractmethod
    def _write(self, kind: FrameKind, numbers: tuple[int, ...], body: Tensor | None, note: Any) -> None:
        """Send one frame."""


class Peer(SendQueue):
    """The connection to another worker: one thread sends what is queued, and receives the answers."""

    def __init__(
        self,
        context: ServiceContext,
        rank: int,
        channel: Channel,
        place: Callable[[FrameHeader], Tensor],  # gives the memory for the body of a frame that it sends back
        take: Callable[[Frame], None],  # handles such a frame
        ended: Callable[[int, str], None],  # called with the rank when the connection has ended, and why
    ) -> None:
        super().__init__(rank)
        self.channel, self._context = channel, context
        self._place, self._take, self._ended = place, take, ended
        self._settings: dict[int, GroupSettings] = {}  # last sent, by span
        self._marked = 0  # the exchange whose sample ranges were sent last
        self._batch: list[Outgoing] = []  # frames that are sent next, together
        self._waker = channel.waker()  # ends the wait for an answer when there is something to send

    def _wake(self) -> None:
        self._waker.wake()

    @property
    def waiting_since(self) -> float | None:
        """When the last frame arrived, while an answer is due; None where none is."""
        with self._counting:
            return self._since if self._open else None

    def _send(self, pending: PendingExchange, request: ShardRequest) -> None:
        if request.values is None:
            self._write(FrameKind.PULL, (request.shard, pending.number, int(pending.peeks)), None, None)
            return
        settings = pending.settings.get(request.span, {})
        if self._settings.get(request.span) != settings:
            self._settings[request.span] = settings
            self._write(FrameKind.SETTINGS, (request.span,), None, settings)
        if pending.marks and self._marked != pending.number:
            self._marked = pending.number
            self._write(FrameKind.MARKS, (pending.number,), None, pending.marks)
        identity = request.shard, pending.clock, request.version, pending.minibatches
        answered_with_values = int(request.out is not None)
        numbers = (*identity, pending.number, request.span, answered_with_values)
        self._write(FrameKind.PUSH, numbers, request.values, None)

    def _write(self, kind: FrameKind, numbers: tuple[int, ...], body: Tensor | None, note: Any) -> None:
        self._batch.append((kind, numbers, body, note))

    def _all_left(self) -> None:
        self._send_batch()
        super()._all_left()

    def _send_batch(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            self._context.send_all(self.channel, batch, meanwhile=self._receive)

    def run(self) -> None:
        """Send what is queued and receive answers until the connection ends."""
        try:
            while not self._over:
                if self._send_queued():  # which receives where the kernel takes no more
                    continue
                if self.channel.wait(self._waker):
                    self._receive()
                else:
                    self._waker.clear()
        except PeerLostError as error:
            self._ended(self.rank, str(error))
        finally:
            self._left.set()
            self._waker.close()

    def _send_queued(self) -> bool:
        """Send what is queued, at most `BATCH` frames at once; whether there was any."""
        found = False
        with contextlib.suppress(Empty):
            while len(self._batch) < BATCH:
                self._queue.get_nowait()()
                found = True
        self._send_batch()
        return found

    def _receive(self) -> None:
        frame = self.channel.receive(self._place)
        with self._counting:
            self._since = runtime.monotonic()
            self._open -= frame.kind in (FrameKind.ANSWER, FrameKind.LEASED)
        self._take(frame)

    def close(self) -> None:
        """Close the connection; the thread ends."""
        super().close()
        self.channel.close()


def fresh(header: FrameHeader) -> Tensor:
    """New memory for a frame's body."""
    return torch.empty(header.numel, dtype=header.dtype)


class Peers:
    """The connections to all workers, by rank."""

    def __init__(self, context: ServiceContext, incoming: dict[int, Channel]) -> None:
        self._context, self.incoming = context, incoming  # incoming: those that the other workers made
        self.remote: dict[int, Peer] = {}  # the connections to the other workers
        self.all: dict[int, SendQueue] = {}  # the same, and this worker's own queue

    def connect(self, remote: dict[int, Peer], own: SendQueue) -> None:
        """Take the connections, once they are made."""
        self.remote = remote
        self.all = {**remote, own.rank: own}

    def __getitem__(self, rank: int) -> SendQueue:
        return self.all[rank]

    @property
    def live(self) -> list[Peer]:
        """The connections to the other live workers."""
        members = self._context.membership
        return [self.remote[rank] for rank in members.live if rank != members.rank]

    def say_all(self, kind: FrameKind, numbers: tuple[int, ...], note: Any = None) -> None:
        """Send all other live workers a frame that has no answer."""
        with self._context.changed:
            for peer in self.live:
                peer.say(kind, numbers, note=note)

    def remind(self) -> None:
        """Send a frame to workers that get no requests, so that they do not declare this worker lost."""
        for peer in self.live:
            if self._context.stall_detector.beat() - peer.said_at > self._context.timeout_s / 4:
                peer.say(FrameKind.STILL_HERE, ())

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`; raises the failure of this worker."""
        while not ready():
            self._context.check()
            with self._context.changed:
                if not ready():
                    self._context.changed.wait(LOOK_EVERY_S)
                self.remind()

    def pause(self, seconds: float) -> None:
        """Wait for a change, at most so long; raises the failure of this worker."""
        self._context.check()
        with self._context.changed:
            self._context.changed.wait(seconds)
            self.remind()

    def close(self) -> None:
        for peer in self.all.values():
            peer.close()
        for channel in self.incoming.values():
            channel.close()

# SPDX-License-Identifier: Apache-2.0
"""One worker's connection to one other: a sender thread, fed by queues, and a reader thread.

The reader waits for nothing but the network, so two workers that send to each other cannot block each other. Grants and
windows (see :mod:`~paceline.communication.ring.connections`) bound what is queued, so the queues hold views of the
tensors that are exchanged, and no copies.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.communication.ring.wire import BYE, EAGER, PIECE, Key, raw
from paceline.communication.sockets.frames import Frame
from paceline.communication.sockets.framing import Channel
from paceline.core import runtime
from paceline.errors import MismatchError, PeerLostError

LINGER_S = 5.0
"""Seconds that a connection stays open after its goodbye, for the other end's: what that still reads is not cut off."""


WRITING, SENT, UNSENT = range(3)
"""A frame is about to be written (the other end may have it before this end knows that it is written); the network has
it; it could not be written."""


@dataclass(frozen=True)
class OutFrame:
    """A frame to be sent; `observer` is called with the receiver's rank and WRITING, then SENT or UNSENT."""

    kind: int
    numbers: tuple[int, ...] = ()
    body: Tensor | None = None
    note: Any = None
    observer: Callable[[int, int], None] | None = None


class Link:
    """The connection to rank `rank`; frames wait until it is established.

    Args:
        rank: the other worker's.
        timeout_s: deadline for the rest of a frame that has begun.
        deliver: gets every frame, in the reader's thread; a MismatchError ends the connection.
        gone: gets why the connection ended, and again if a frame was to be sent over it later.

    Attributes:
        left: the other worker has left in order.
        lost: why the connection ended; empty before.
    """

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        deliver: Callable[[Link, Frame], None],
        gone: Callable[[Link, str], None],
    ) -> None:
        self.rank, self._timeout_s, self._deliver, self._gone = rank, timeout_s, deliver, gone
        self.left, self.lost = False, ""
        self._changed = runtime.Condition()
        self._channel: Channel | None = None
        self._urgent: deque[OutFrame] = deque()  # all frames but data
        self._data: OrderedDict[Key, deque[OutFrame]] = OrderedDict()  # by operation: they send a piece in turn
        self._closing = self._flushed = self._ended = False

    def attach(self, channel: Channel) -> bool:
        """Use the established connection, and send the waiting frames; False if there was one before."""
        with self._changed:
            if self._channel is not None or self.lost or self._closing:
                return False
            channel.adjust(limit=PIECE, stall_s=self._timeout_s)
            self._channel = channel
        runtime.thread(self._send, f"to-{self.rank}", (channel,)).start()
        return True

    def read(self) -> None:
        """Deliver frames until the connection ends."""
        channel = self._channel
        assert channel is not None
        room = torch.empty(PIECE, dtype=torch.uint8)
        try:
            while True:
                frame = channel.receive(lambda header: room[: header.body_bytes])
                try:
                    self._deliver(self, frame)
                except MismatchError as error:
                    raise MismatchError(f"{channel.peer}: {error}; the connection is closed") from error
        except (PeerLostError, MismatchError) as error:
            self.end(str(error))
        except BaseException as error:
            self.end(f"its frames could not be handled: {error!r}")
            raise

    def post(self, out: OutFrame, key: Key | None = None, here: bool = False) -> None:
        """Queue a frame.

        Args:
            out: the frame.
            key: the operation whose data it has; None for other frames, which are sent before data.
            here: send a small frame in this thread if none waits before it.
        """
        channel, small = self._channel, out.body is None or out.body.nbytes <= EAGER
        if here and channel is not None and not self._urgent and not self._data and small and channel.takes():
            self._put(channel, out)
            return
        with self._changed:
            ended = self._ended
            if not ended:
                (self._urgent if key is None else self._data.setdefault(key, deque())).append(out)
                self._changed.notify_all()
        if ended and key is not None:
            self._gone(self, self.lost)

    def drop(self) -> None:
        """Drop the queued data."""
        with self._changed:
            self._data.clear()

    def said_goodbye(self) -> None:
        """The other worker has left in order."""
        with self._changed:
            self.left = True
            self._changed.notify_all()

    def close(self) -> None:
        """Send the queued frames and a goodbye, and end; all of it in the background."""
        self.post(OutFrame(BYE))
        with self._changed:
            self._closing = True
            if self._channel is None:
                self._ended = True
            self._changed.notify_all()

    def flushed(self, seconds: float) -> bool:
        """Wait until the network has all frames up to the goodbye."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or self._flushed, seconds)

    def end(self, reason: str) -> bool:
        """End the connection; returns False if it had ended before."""
        with self._changed:
            first, self._ended = not self._ended, True
            self._urgent.clear()
            self._data.clear()
            if first:
                self.lost = reason
            self._changed.notify_all()
        if self._channel is not None:
            self._channel.close()
        if first:
            self._gone(self, reason)
        return first

    def _send(self, channel: Channel) -> None:
        while (out := self._next()) is not None:
            self._put(channel, out)
        with self._changed:
            self._flushed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.left or self._ended, LINGER_S)
            self._ended = True
        channel.close()

    def _put(self, channel: Channel, out: OutFrame) -> None:
        body = out.body if out.body is None else raw(out.body)
        if out.observer is not None:
            out.observer(self.rank, WRITING)
        try:
            channel.send(out.kind, out.numbers, body, out.note, self._timeout_s)
        except PeerLostError as error:
            if out.observer is not None:
                out.observer(self.rank, UNSENT)
            if not self.end(str(error)):
                self._gone(self, self.lost)
        else:
            if out.observer is not None:
                out.observer(self.rank, SENT)

    def _next(self) -> OutFrame | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._closing or self._urgent or self._data)
            if self._ended:
                return None
            if self._urgent:
                return self._urgent.popleft()
            if self._data:
                key, waiting = self._data.popitem(last=False)
                out = waiting.popleft()
                if waiting:
                    self._data[key] = waiting  # after the other operations
                return out
            return None

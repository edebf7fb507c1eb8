# SPDX-License-Identifier: Apache-2.0
"""One worker's connection to one other: a thread that sends, fed by queues, and a thread that reads.

The reader never waits for anything but the network, so two that send to each other cannot stop each other. What may be
sent at all is settled before (grants, and windows; see :mod:`~paceline.communication.ring.operation`), so the queues
hold views of tensors that are being exchanged anyway, and no copies.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.communication.ring.wire import BYE, EAGER, PIECE, Key, raw
from paceline.communication.sockets.frames import Frame
from paceline.communication.sockets.framing import Channel
from paceline.errors import MismatchError, PeerLostError

LINGER_S = 5.0
"""Seconds that a connection stays open behind the goodbye, for the other end's: what it still reads is not cut off."""


class Owner(Protocol):
    """Who counts the frames that go to a rank."""

    def handing(self, rank: int) -> None:
        """One is about to be written. The other end may have it before this end knows that it is written."""

    def sent(self, rank: int) -> None:
        """The network has it."""

    def failed(self, rank: int) -> None:
        """It could not be written."""


@dataclass(frozen=True)
class Out:
    """A frame to be sent, and for data whose it is."""

    kind: int
    numbers: tuple[int, ...] = ()
    body: Tensor | None = None
    note: Any = None
    owner: Owner | None = None


class Link:
    """The connection to rank `rank`, which may have to come about yet.

    Args:
        rank: the other one.
        timeout_s: within which a frame that has begun must be over.
        deliver: is given every frame that comes, in the reader's thread; a MismatchError ends the connection.
        gone: is told why the connection is no more, and again where something was to go over it.

    Attributes:
        left: the other one has said goodbye.
        lost: why there is no connection any more; empty while there is one or may be one.
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
        self._changed = threading.Condition()
        self._channel: Channel | None = None
        self._words: deque[Out] = deque()  # what is no data
        self._turns: OrderedDict[Key, deque[Out]] = OrderedDict()  # data by operation: each sends a piece in turn
        self._closing = self._quiet = self._ended = False
        self._threads: list[threading.Thread] = []

    def attach(self, channel: Channel) -> bool:
        """Take the connection that has come about, and send what waits for it; False if there was one before."""
        with self._changed:
            if self._channel is not None or self.lost or self._closing:
                return False
            channel.limit, channel.stall_s = PIECE, self._timeout_s
            self._channel = channel
        sender = threading.Thread(target=self._send, args=(channel,), name=f"to-{self.rank}", daemon=True)
        sender.start()
        self._threads.append(sender)
        return True

    def read(self) -> None:
        """Hand on what comes, to the end of the connection."""
        channel = self._channel
        assert channel is not None
        self._threads.append(threading.current_thread())
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
            self.end(f"what came from it could not be worked off: {error!r}")
            raise

    def post(self, out: Out, key: Key | None = None, here: bool = False) -> None:
        """Send `out` when its turn comes.

        Args:
            key: the operation that data belong to; None for words, which go before data.
            here: where nothing waits before it and it is small, send it in this thread.
        """
        channel = self._channel
        if here and channel is not None and not self._words and not self._turns and _small(out) and channel.takes():
            self._put(channel, out)
            return
        with self._changed:
            ended = self._ended
            if not ended:
                (self._words if key is None else self._turns.setdefault(key, deque())).append(out)
                self._changed.notify_all()
        if ended and key is not None:
            self._gone(self, self.lost)

    def drop(self) -> None:
        """Forget the data that wait to be sent."""
        with self._changed:
            self._turns.clear()

    def said_goodbye(self) -> None:
        """The other one has."""
        with self._changed:
            self.left = True
            self._changed.notify_all()

    def close(self) -> None:
        """Send what still waits, and goodbye, and end; all of it in the background."""
        self.post(Out(BYE))
        with self._changed:
            self._closing = True
            if self._channel is None:
                self._ended = True
            self._changed.notify_all()

    def flushed(self, seconds: float) -> bool:
        """Wait until the network has what was to be sent before the end."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or self._quiet, seconds)

    def end(self, reason: str) -> bool:
        """The connection is no more; whether that is new."""
        with self._changed:
            first, self._ended = not self._ended, True
            self._words.clear()
            self._turns.clear()
            if first:
                self.lost = reason
            self._changed.notify_all()
        if self._channel is not None:
            self._channel.close()
        if first:
            self._gone(self, reason)
        return first

    def join(self, seconds: float) -> None:
        """Wait for the threads, behind `end`: one that is inside torch when Python ends would abort the process."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _send(self, channel: Channel) -> None:
        while (out := self._next()) is not None:
            self._put(channel, out)
        with self._changed:
            self._quiet = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.left or self._ended, LINGER_S)
            self._ended = True
        channel.close()

    def _put(self, channel: Channel, out: Out) -> None:
        body = out.body if out.body is None else raw(out.body)
        if out.owner is not None:
            out.owner.handing(self.rank)
        try:
            channel.send(out.kind, out.numbers, body, out.note, self._timeout_s)
        except PeerLostError as error:
            if out.owner is not None:
                out.owner.failed(self.rank)
            if not self.end(str(error)):
                self._gone(self, self.lost)
        else:
            if out.owner is not None:
                out.owner.sent(self.rank)

    def _next(self) -> Out | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._closing or self._words or self._turns)
            if self._ended:
                return None
            if self._words:
                return self._words.popleft()
            if self._turns:
                key, waiting = self._turns.popitem(last=False)
                out = waiting.popleft()
                if waiting:
                    self._turns[key] = waiting  # behind the others
                return out
            return None


def _small(out: Out) -> bool:
    return out.body is None or out.body.nbytes <= EAGER


def abandon(channel: Channel) -> None:
    """Close a connection that nobody wants."""
    with contextlib.suppress(OSError):
        channel.close()

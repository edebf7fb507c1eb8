# SPDX-License-Identifier: Apache-2.0
"""The server's end of a worker's connection: a thread of its own sends, so that the state machine never waits."""

from __future__ import annotations

import queue
from typing import Any

from paceline.communication.sockets.channel import Channel
from paceline.core import runtime
from paceline.errors import PacelineError
from paceline.flow.control.wire import MESSAGE_KINDS

OUTBOX = 1000
"""Most frames queued for a worker that does not read them; with more it is lost."""
SEND_S = 10.0
"""Seconds in which a worker must read a frame."""
READ_S = 5.0
"""Seconds that an ended connection stays open for what the worker still sends. To close with unread frames resets the
connection, and the worker would lose the last frames that were sent to it."""


class ServerConnection:
    """Sends frames to one worker, in order.

    Args:
        channel: the connection; its owner closes it.
        name: of the thread.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        self.channel = channel
        self._outbox: queue.SimpleQueue[tuple[int, tuple[int, ...], Any] | None] = runtime.SimpleQueue()
        self._read, self._sent = runtime.Event(), runtime.Event()
        self._ended = False
        runtime.thread(self._send, f"paceline-say-{name}").start()

    def send(self, kind: int, numbers: tuple[int, ...] = (), note: Any = None) -> None:
        """Queue a frame; never waits."""
        if self._outbox.qsize() > OUTBOX:
            self.channel.close()
        else:
            self._outbox.put((kind, numbers, note))

    def end(self, read: bool = False) -> None:
        """Close the connection once all queued frames are sent and the worker has closed its end.

        Args:
            read: the worker has closed its end, or nobody reads from it any more.
        """
        if read:
            self._read.set()
        if not self._ended:
            self._ended = True
            self._outbox.put(None)

    def wait_sent(self, limit_s: float) -> None:
        """Wait until an ended connection has sent its frames and is closed."""
        self._sent.wait(limit_s)

    def _send(self) -> None:
        try:
            while (one := self._outbox.get()) is not None:
                kind, numbers, note = one
                try:
                    self.channel.send(kind, numbers, note=note, deadline_s=SEND_S)
                except ValueError as error:  # too long for a frame
                    self.channel.send(MESSAGE_KINDS["wrong"], numbers[:1], note=str(error)[:500], deadline_s=SEND_S)
            self._read.wait(READ_S)
        except (PacelineError, OSError, ValueError):
            pass  # its reader sees the closed connection
        finally:
            self.channel.close()
            self._sent.set()

# SPDX-License-Identifier: Apache-2.0
"""The server's end of a worker's connection: the state machine never waits for it.

A small frame that the kernel takes at once is sent by the thread that has it, since to wake a thread for each of a
thousand verdicts takes ten times as long as to send them. All else is left to a thread of the connection's own.
"""

from __future__ import annotations

import queue

from paceline.communication.sockets.channel import Channel
from paceline.core import runtime
from paceline.errors import PacelineError
from paceline.flow.control.wire import MESSAGE_KINDS

SMALL = 1024
"""Bytes of a note, at most, that may be sent at once."""
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
        self._outbox: queue.SimpleQueue[tuple[int, tuple[int, ...], bytes] | None] = runtime.SimpleQueue()
        self._queued = self._taken = 0  # frames; each is counted by one thread only
        self._read, self._sent = runtime.Event(), runtime.Event()
        self._ended = False
        runtime.thread(self._send, f"paceline-say-{name}").start()

    def send(self, kind: int, numbers: tuple[int, ...] = (), note: bytes = b"") -> None:
        """Send a frame, or queue it; never waits. One thread at a time.

        Args:
            kind: of the frame.
            numbers: of the frame.
            note: as JSON.
        """
        if self._queued == self._taken and len(note) <= SMALL and self.channel.takes():
            self._try(kind, numbers, note)
        elif self._outbox.qsize() > OUTBOX:
            self.channel.close()
        else:
            self._queued += 1
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
                if not self._try(*one):
                    return
                self._taken += 1
            self._read.wait(READ_S)
        finally:
            self.channel.close()
            self._sent.set()

    def _try(self, kind: int, numbers: tuple[int, ...], note: bytes) -> bool:
        """Send a frame; whether it is sent. If not, the connection is closed, which its reader sees."""
        try:
            try:
                self.channel.send(kind, numbers, note=note, deadline_s=SEND_S)
            except ValueError as error:  # too long for a frame
                self.channel.send(MESSAGE_KINDS["wrong"], numbers[:1], note=str(error)[:500], deadline_s=SEND_S)
            return True
        except (PacelineError, OSError, ValueError):
            self.channel.close()
            return False

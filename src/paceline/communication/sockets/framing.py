# SPDX-License-Identifier: Apache-2.0
"""Frames over one connected socket, one way and the other, with deadlines.

The socket never blocks: a call tries first and polls when there is nothing to do, so that a thread that sends and one
that receives have deadlines of their own, and `close` ends the waits of both. All of it runs without the GIL.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.communication.sockets.frames import (
    HEADER_BYTES,
    Closed,
    Frame,
    FrameHeader,
    Late,
    fitting,
    memory,
    read_note,
    write_note,
)
from paceline.errors import MismatchError

STALL_S = 60.0
"""Seconds that the rest of a frame may take once it has begun, where the caller names no deadline."""
AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What an attempt on a socket raises that has to wait."""
_SLICE = 1 << 26
_RECORD = 15_000  # bytes; with that a small frame is one record of TLS rather than two
_TLS_SLICE = 1 << 18  # a TLS object does one thing at a time: short turns, so that reading and writing alternate


class Channel:
    """One connection to one peer.

    One thread may send while another receives, and several may do the same: whole frames, one after another.

    Args:
        sock: a connected TCP socket, or one of TLS after its handshake; the channel owns it from now on.
        peer: the other end's name in messages.
        limit: bytes of a body that is received, at most.

    Attributes:
        bytes_sent: headers, notes and bodies of whole frames, without what TLS adds.
        bytes_received: the same of frames that came.
        heard_at: when something came last, on the clock of `time.monotonic`.
        stall_s: seconds that the rest of a frame may take once it has begun, where a call names no deadline.
    """

    def __init__(self, sock: socket.socket, peer: str, limit: int = 1 << 31) -> None:
        self.peer = peer
        self.limit = limit
        self.stall_s = STALL_S
        self.bytes_sent = 0
        self.bytes_received = 0
        self.heard_at = time.monotonic()
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._slice = _TLS_SLICE if self._tls else _SLICE
        self._turn = threading.Lock()  # OpenSSL allows one call at a time for a connection
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._guard = threading.Lock()
        self._users = 0  # threads inside send or receive: the last one lets go of the file descriptor
        self._closed = False
        self._head = bytearray(HEADER_BYTES)
        _set_options(sock)

    @property
    def closed(self) -> bool:
        """Whether this end has closed the channel, by `close` or because of an error."""
        return self._closed

    def send(
        self,
        kind: int,
        numbers: Sequence[int] = (),
        body: Tensor | None = None,
        note: Any = None,
        deadline_s: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Hand one frame to the network; return when it has all of it, which does not mean that the peer has.

        Args:
            kind: 0..255.
            numbers: up to 8 whole numbers of 64 bits.
            body: a contiguous tensor of the host, any shape; sent from its own memory, which must not change meanwhile.
            note: anything that JSON can say, up to 1 MiB.
            deadline_s: seconds for all of it; None: `stall_s`, counted from this thread's turn.
            meanwhile: called when the network takes nothing now and something has come: to `receive` it. Two ends that
                both send more than the network holds, and receive nothing meanwhile, wait for each other for ever.

        Raises:
            PeerLostError: the channel is closed, or (with the channel closed by that) the deadline passed.
            ValueError: what no frame can say; nothing was sent.
        """
        text = write_note(note)
        header = FrameHeader.of(kind, numbers, text, body)
        parts = [memoryview(header.pack() + text)]
        if body is not None:
            parts.append(memory(body))
        if self._tls and header.body_bytes <= _RECORD:
            parts = [memoryview(b"".join(parts))]
        deadline = _deadline(deadline_s)
        with self._turn_of(self._sending, deadline), self._inside():
            try:
                until = deadline if deadline is not None else time.monotonic() + self.stall_s
                self._write(parts, until, meanwhile)
                self.bytes_sent += HEADER_BYTES + header.note_bytes + header.body_bytes
            except BaseException:
                self.close()  # a part of a frame may be out
                raise

    def receive(
        self, buffer: Tensor | Callable[[FrameHeader], Tensor] | None = None, deadline_s: float | None = None
    ) -> Frame:
        """Wait for the next frame.

        Args:
            buffer: where the body goes, a contiguous tensor of the host of the body's dtype and number of elements, or
                what makes one of the header; None: a fresh tensor of one dimension. Without a body it is not used.
            deadline_s: seconds for all of the frame. None: its beginning may take any time, and once it has begun the
                rest must come within `stall_s`. To end a wait from another thread, `close` the channel.

        Raises:
            Closed: the connection is gone.
            Late: the deadline passed; the channel is still of use if nothing of the frame had come (see `closed`).
            MismatchError: what came is no frame, or does not fit; the channel is closed.
            ValueError: `buffer` is not a contiguous tensor of the host.
        """
        if isinstance(buffer, Tensor):
            memory(buffer)  # a buffer that can take nothing is refused before anything has come
        deadline = _deadline(deadline_s)
        with self._turn_of(self._receiving, deadline), self._inside():
            begun = 0
            try:
                begun = self._read_some(memoryview(self._head), deadline)
                return self._rest(begun, buffer, deadline if deadline is not None else time.monotonic() + self.stall_s)
            except BaseException as error:
                if begun or not isinstance(error, Late):
                    self.close()  # the start of the next frame is unknown
                if isinstance(error, MismatchError):
                    raise MismatchError(f"from {self.peer}: {error}; the connection is closed") from error
                raise

    def close(self) -> None:
        """End the connection, and every wait on it; may be called from any thread, and again.

        What was sent and not yet received may be lost by it: let the peer answer the last frame first.
        """
        with self._guard:
            if not self._closed:
                self._closed = True
                # Not SSLSocket's own, which would let a thread that still reads go on without the encryption.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            if self._users == 0:
                self._sock.close()

    def abandon(self) -> None:
        """In a forked child: let go of the descriptor without a word, as the connection is the parent's."""
        self._closed = True
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rest(self, begun: int, buffer: Tensor | Callable[[FrameHeader], Tensor] | None, deadline: float) -> Frame:
        """The frame of whose header the first `begun` bytes are there."""
        self._fill(memoryview(self._head)[begun:], deadline)
        header = FrameHeader.read(self._head, self.limit)
        note = bytearray(header.note_bytes)
        self._fill(memoryview(note), deadline)
        said = read_note(note)
        body = None
        if header.dtype is not None:
            if buffer is None:
                body = torch.empty(header.numel, dtype=header.dtype)
            else:
                body = buffer if isinstance(buffer, Tensor) else buffer(header)
            self._fill(fitting(body, header), deadline)
        self.bytes_received += HEADER_BYTES + header.note_bytes + header.body_bytes
        return Frame(header.kind, header.numbers, body, said)

    def readable(self) -> bool:
        """Whether something has come that was not received yet, or the connection has ended."""
        return self.wait(None, time.monotonic())

    def takes(self) -> bool:
        """Whether the network takes a small frame now; False where the channel is closed."""
        try:
            with self._inside():
                poll = select.poll()
                poll.register(self._sock, select.POLLOUT)
                return bool(poll.poll(0))
        except Closed:
            return False

    def wait(self, other: socket.socket | None, deadline: float | None = None) -> bool:
        """Wait until something comes here, or at `other`; whether it is here. False at the deadline as well."""
        with self._inside():
            if self._tls:
                with self._turn:
                    if self._sock.pending():  # type: ignore[attr-defined]
                        return True
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if other is not None:
                poll.register(other, select.POLLIN)
            return any(fd == self._sock.fileno() for fd, _ in poll.poll(milliseconds(deadline)))

    def _write(self, parts: list[memoryview], deadline: float, meanwhile: Callable[[], object] | None) -> None:
        while parts:
            if not parts[0].nbytes:
                parts.pop(0)
                continue
            try:
                if self._tls:
                    with self._turn:
                        sent = self._sock.send(parts[0][: self._slice])
                else:
                    sent = self._sock.sendmsg(parts)
            except AGAIN as error:
                if meanwhile is None:
                    self._poll(error, select.POLLOUT, deadline)
                elif self._either(deadline):
                    meanwhile()
                continue
            except OSError as error:
                raise self._lost(error) from error
            while sent:
                step = min(sent, parts[0].nbytes)
                parts[0] = parts[0][step:]
                sent -= step
                if not parts[0].nbytes:
                    parts.pop(0)

    def _fill(self, view: memoryview, deadline: float) -> None:
        while view.nbytes:
            view = view[self._read_some(view, deadline) :]

    def _read_some(self, view: memoryview, deadline: float | None) -> int:
        """Wait until there is something, and put it into the beginning of `view`; how many bytes."""
        while not self._closed:
            try:
                if self._tls:
                    with self._turn:
                        got = self._sock.recv_into(view[: self._slice])
                else:
                    got = self._sock.recv_into(view[: self._slice])
            except AGAIN as error:
                self._poll(error, select.POLLIN, deadline)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if got:
                self.heard_at = time.monotonic()
                return got
            break
        raise self._lost()

    def _either(self, deadline: float) -> bool:
        """Wait until something can be sent or has come; whether it has come. `Late` once the deadline has passed."""
        if self._tls:
            with self._turn:
                if self._sock.pending():  # type: ignore[attr-defined]
                    return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLOUT)
        ready = poll.poll(milliseconds(deadline))
        if not ready:
            raise Late(f"{self.peer} did not take what was sent in time")
        return bool(ready[0][1] & ~select.POLLOUT)

    def _poll(self, error: OSError, events: int, deadline: float | None) -> None:
        """Wait for what the attempt that ended with `error` lacked; `Late` once the deadline has passed."""
        if not _ready(self._sock, error, events, deadline):
            raise Late(f"{self.peer} did not {'answer' if events == select.POLLIN else 'take what was sent'} in time")

    def _lost(self, error: OSError | None = None) -> Closed:
        if self._closed:
            return Closed(f"the connection to {self.peer} was closed here before this was over")
        if error is None:
            return Closed(f"{self.peer} closed the connection: it has ended or died")
        return Closed(f"the connection to {self.peer} is lost: {error}")

    @contextlib.contextmanager
    def _turn_of(self, lock: threading.Lock, deadline: float | None) -> Iterator[None]:
        left = milliseconds(deadline)
        if not lock.acquire(timeout=-1 if left is None else left / 1000):
            raise Late(f"the frame before this one, to or from {self.peer}, was not over in time")
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """While a thread uses the file descriptor it stays open, so that its number is not reused."""
        with self._guard:
            if self._closed:
                raise Closed(f"the connection to {self.peer} is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._guard:
                self._users -= 1
                if self._closed and self._users == 0:
                    self._sock.close()


def milliseconds(deadline: float | None) -> float | None:
    """Milliseconds until `deadline` for a poll, rounded up and never negative; None waits for ever."""
    if deadline is None or deadline == math.inf:
        return None
    return math.ceil(max(0.0, min(deadline - time.monotonic(), 1e6)) * 1000)


def _deadline(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


def _ready(sock: socket.socket, error: OSError, events: int, deadline: float | None) -> bool:
    """Whether `sock` has, before the deadline, what the attempt that ended with `error` lacked."""
    if isinstance(error, ssl.SSLWantReadError):
        events = select.POLLIN
    elif isinstance(error, ssl.SSLWantWriteError):
        events = select.POLLOUT
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(milliseconds(deadline)))


def _set_options(sock: socket.socket) -> None:
    """No blocking, no delay of small frames, and a word from time to time where nothing is sent."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # other systems have other names
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

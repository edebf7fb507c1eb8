# SPDX-License-Identifier: Apache-2.0
"""Sends and receives frames over one connected socket, with deadlines.

The socket never blocks: a call tries first and polls if it cannot continue. So a sending and a receiving thread have
deadlines of their own, and `close` ends the waits of both. The system calls run without the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import os
import platform
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.communication.sockets.frames import (
    HEADER_BYTES,
    Closed,
    Frame,
    FrameHeader,
    Late,
    Outgoing,
    advance,
    fitting,
    memory,
    parts_of,
    read_note,
)
from paceline.communication.sockets.identity import Identity
from paceline.errors import MismatchError


def set_options(sock: socket.socket) -> None:
    """Non-blocking, without delay of small frames, and with keepalive."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # the names differ between systems
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def milliseconds(deadline: float | None) -> float | None:
    """Milliseconds until `deadline` for a poll, rounded up and never negative; None for no limit."""
    if deadline is None or deadline == math.inf:
        return None
    return math.ceil(max(0.0, min(deadline - time.monotonic(), 1e6)) * 1000)


AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Errors of a socket call that would block."""


def receive_records(sock: ssl.SSLSocket, view: memoryview) -> int:
    """Copy what has arrived to the beginning of `view`; returns the number of bytes, 0 at the end of the connection.

    Raises:
        One of `AGAIN`: nothing has arrived.
    """
    got = 0
    try:
        while got < view.nbytes and (more := sock.recv_into(view[got:])):
            got += more
    except AGAIN:
        if not got:
            raise
    return got


class Waker:
    """A thread waits for data at its channel *or* for `wake`: see `Channel.wait`."""

    def __init__(self) -> None:
        self._wake_up, self._woken = socket.socketpair()
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)
        self._rings = False  # a wake-up is under way, and a further one would say the same

    def fileno(self) -> int:
        """What to poll."""
        return self._woken.fileno()

    def wake(self) -> None:
        """End the wait, or the next one; from any thread."""
        if self._rings:
            return
        self._rings = True
        with contextlib.suppress(OSError):  # full of wake-ups that were not read yet, or closed
            self._wake_up.send(b"!")

    def clear(self) -> None:
        """Forget the wake-ups so far; look only then for what they were about."""
        with contextlib.suppress(OSError):
            self._woken.recv(4096)
        self._rings = False  # not before: a wake-up that this forgets would count as under way for ever

    def close(self) -> None:
        """End it."""
        self._wake_up.close()
        self._woken.close()


STALL_S = 60.0
"""Seconds that the rest of a frame may take once it has begun, if the caller gives no deadline."""
_SLICE = 1 << 26
_BUFFERS = 16  # given to the kernel at a time: as many as it takes at once where they are large
_RECORD = 15_000  # bytes; up to this a small frame is one TLS record instead of two
_RECORD_BYTES = 1 << 14  # of TLS, at most
MOST_RECORDS = 23_726_566
"""Records that one key of AES-GCM may encrypt: 2^24.5 (RFC 8446, 5.5)."""
logger = logging.getLogger("paceline")
_TLS_SLICE = 1 << 18  # a TLS connection allows one call at a time: short ones, so that reads and writes alternate


class Channel:
    """One connection to one peer.

    Several threads may send and receive at the same time: whole frames, one after another.

    Args:
        sock: a connected TCP socket, or a TLS socket after its handshake; the channel owns it.
        peer: the other end's name in messages.
        limit: most bytes of a received body.

    Attributes:
        identity: of the other end's certificate; None without TLS.
        bytes_sent: headers, notes and bodies of whole frames, without the overhead of TLS.
        bytes_received: the same for received frames.
        records_sent: records of TLS that were sent with the present key; estimated from the calls.
        keys_renewed: how often this end has renewed the key with which it sends.
        heard_at: when data were last received, on the monotonic clock.
        stall_s: seconds that the rest of a frame may take once it has begun, if a call gives no deadline.
    """

    def __init__(self, sock: socket.socket, peer: str, limit: int = 1 << 31) -> None:
        self.peer = peer
        self.identity = Identity.of(sock)
        self.limit = limit
        self.stall_s = STALL_S
        self.bytes_sent = 0
        self.records_sent = self.keys_renewed = 0
        self.bytes_received = 0
        self.heard_at = time.monotonic()
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._slice = _TLS_SLICE if self._tls else _SLICE
        self._turn = threading.Lock()  # OpenSSL allows one call at a time for a connection
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._guard = threading.Lock()
        self._users = 0  # threads inside send or receive: the last one closes the file descriptor
        self._closed = False
        self._head = memoryview(bytearray(HEADER_BYTES))
        set_options(sock)

    def adjust(self, *, limit: int | None = None, stall_s: float | None = None, peer: str | None = None) -> None:
        """Set what is known of the other end by now; arguments as the attributes, None to keep one."""
        self.limit = self.limit if limit is None else limit
        self.stall_s = self.stall_s if stall_s is None else stall_s
        self.peer = self.peer if peer is None else peer

    @property
    def closed(self) -> bool:
        """Whether this end has closed the channel, by `close` or after an error."""
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
        """Send one frame; return once the kernel has taken it, perhaps before the peer has received it.

        Args:
            kind: 0..255.
            numbers: up to 8 whole numbers of 64 bits.
            body: a contiguous host tensor of any shape; sent from its own memory, which must not change meanwhile.
            note: serializable as JSON, up to 1 MiB.
            deadline_s: seconds for the whole frame; None: `stall_s`, without the wait for other threads' frames.
            meanwhile: called if the kernel takes nothing now and data have arrived: it should `receive` them. Two ends
                that both send more than the network buffers, and receive nothing, deadlock.

        Raises:
            PeerLostError: the channel is closed, or the deadline has passed, which closes it.
            ValueError: the frame is not valid; nothing was sent.
        """
        self.send_all([(kind, numbers, body, note)], deadline_s, meanwhile)

    def send_all(
        self,
        frames: Iterable[Outgoing],
        deadline_s: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Send frames, each as `send` does, with few calls of the kernel; each has its own `deadline_s`."""
        parts: list[memoryview] = []
        ends = []  # how many parts there are up to the end of each frame
        for frame in frames:
            parts += parts_of(frame, _RECORD if self._tls else 0)
            ends.append(len(parts))
        size = sum(part.nbytes for part in parts)
        deadline = _deadline(deadline_s)
        self._enter(self._sending, deadline)
        try:
            seconds, sent = self.stall_s if deadline_s is None else deadline_s, 0
            until = time.monotonic() + seconds if deadline is None else deadline
            for end in ends:
                while sent < end:
                    sent += self._write(parts, sent, until, meanwhile)
                until = time.monotonic() + seconds
            self.bytes_sent += size
        except BaseException:
            self.close()  # a part of the frame may have been sent
            raise
        finally:
            self._unuse()
            self._sending.release()

    def receive(
        self, buffer: Tensor | Callable[[FrameHeader], Tensor] | None = None, deadline_s: float | None = None
    ) -> Frame:
        """Wait for the next frame.

        Args:
            buffer: for the body, a contiguous host tensor of its dtype and number of elements, or a function that makes
                one from the header; None: a new one-dimensional tensor.
            deadline_s: seconds for the whole frame. None: a frame may begin at any time, and its rest must arrive
                within `stall_s`. To end a wait from another thread, `close` the channel.

        Raises:
            Closed: the connection is gone.
            Late: the deadline has passed; the channel stays open unless a part of the frame has arrived.
            MismatchError: the frame is malformed or does not fit; the channel is closed.
            ValueError: `buffer` is not a contiguous host tensor.
        """
        if isinstance(buffer, Tensor):
            memory(buffer)  # refuse an invalid buffer before data arrive
        deadline = _deadline(deadline_s)
        self._enter(self._receiving, deadline)
        begun = 0
        try:
            begun = self._read_some(self._head, deadline)
            return self._rest(begun, buffer, deadline if deadline is not None else self.heard_at + self.stall_s)
        except BaseException as error:
            if begun or not isinstance(error, Late):
                self.close()  # the start of the next frame is unknown
            if isinstance(error, MismatchError):
                raise MismatchError(f"from {self.peer}: {error}; the connection is closed") from error
            raise
        finally:
            self._unuse()
            self._receiving.release()

    def close(self) -> None:
        """End the connection, and every wait on it; from any thread, also repeatedly.

        Frames that the peer has not received may be lost: let it answer the last frame first.
        """
        with self._guard:
            if not self._closed:
                self._closed = True
                # Not SSLSocket's own, after which a reading thread would continue without encryption.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            if self._users == 0:
                self._sock.close()

    def abandon(self) -> None:
        """In a forked child: close the file descriptor only, because the connection is the parent's."""
        self._closed = True
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rest(self, begun: int, buffer: Tensor | Callable[[FrameHeader], Tensor] | None, deadline: float) -> Frame:
        """Receive the rest of a frame after the first `begun` bytes of its header."""
        self._fill(self._head[begun:], deadline)
        header = FrameHeader.read(self._head, self.limit)
        content = body = None
        if header.note_bytes:
            note = bytearray(header.note_bytes)
            self._fill(memoryview(note), deadline)
            content = read_note(note)
        if header.dtype is not None:
            if buffer is None:
                body = torch.empty(header.numel, dtype=header.dtype)
            else:
                body = buffer if isinstance(buffer, Tensor) else buffer(header)
            self._fill(fitting(body, header), deadline)
        self.bytes_received += HEADER_BYTES + header.note_bytes + header.body_bytes
        return Frame(header.kind, header.numbers, body, content)

    def takes(self) -> bool:
        """Whether the kernel takes a small frame now; False if the channel is closed."""
        try:
            self._use()
        except Closed:
            return False
        try:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            return bool(poll.poll(0))
        finally:
            self._unuse()

    def waker(self) -> Waker:
        """Ends waits here."""
        return Waker()

    def wait(self, other: Waker | None, deadline: float | None = None) -> bool:
        """Wait until data arrive here or `other` wakes; whether data are here. False at the deadline."""
        self._use()
        try:
            if self._decrypted():
                return True
            poll, own = select.poll(), self._sock.fileno()
            poll.register(own, select.POLLIN)
            if other is not None:
                poll.register(other, select.POLLIN)
            polled = poll.poll(milliseconds(deadline))
            return bool(polled) and own in (polled[0][0], polled[-1][0])
        finally:
            self._unuse()

    def _write(
        self, parts: list[memoryview], first: int, deadline: float, meanwhile: Callable[[], object] | None
    ) -> int:
        """Send what the kernel takes at once of the parts from `first` on; how many it took whole."""
        while True:
            try:
                if self._tls:
                    with self._turn:
                        sent = self._sock.send(parts[first][: self._slice])
                        self._count_records(sent)
                else:
                    sent = self._sock.sendmsg(parts[first : first + _BUFFERS])
                break
            except AGAIN as error:
                if meanwhile is None:
                    self._poll(error, select.POLLOUT, deadline)
                elif self._either(deadline):
                    meanwhile()
            except OSError as error:
                raise self._lost(error) from error
        return advance(parts, first, sent)

    def _count_records(self, sent: int) -> None:
        """Renew the key long before it has encrypted too much; say once where that is not possible."""
        before, self.records_sent = self.records_sent, self.records_sent - (-sent // _RECORD_BYTES)
        if self.records_sent < MOST_RECORDS // 2:
            return
        if renew_key(self._sock):  # type: ignore[arg-type]
            self.records_sent, self.keys_renewed = 0, self.keys_renewed + 1
        elif before < MOST_RECORDS <= self.records_sent:
            logger.warning(
                "the connection to %s has sent %d records with one key, AES-GCM's margin is for no more (RFC 8446, "
                "5.5), and this Python cannot renew it: see docs/guide/security.md; a new connection has a new key",
                self.peer,
                self.records_sent,
            )

    def _fill(self, view: memoryview, deadline: float) -> None:
        while view.nbytes:
            view = view[self._read_some(view, deadline) :]

    def _read_some(self, view: memoryview, deadline: float | None) -> int:
        """Wait for data, and copy them to the beginning of `view`; returns the number of bytes."""
        while not self._closed:
            try:
                if self._tls:
                    with self._turn:
                        got = receive_records(self._sock, view[: self._slice])  # type: ignore[arg-type]
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
        """Wait until data can be sent or have arrived; whether they have arrived. `Late` at the deadline."""
        if self._decrypted():
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLOUT)
        polled = poll.poll(milliseconds(deadline))
        if not polled:
            raise Late(f"{self.peer} did not take what was sent in time")
        return bool(polled[0][1] & ~select.POLLOUT)

    def _poll(self, error: OSError, events: int, deadline: float | None) -> None:
        """Wait until the call that ended with `error` can continue; `Late` at the deadline."""
        poll, awaited = select.poll(), events
        if isinstance(error, ssl.SSLWantReadError):
            awaited = select.POLLIN
        elif isinstance(error, ssl.SSLWantWriteError):
            awaited = select.POLLOUT
        poll.register(self._sock, awaited)
        if not poll.poll(milliseconds(deadline)):
            raise Late(f"{self.peer} did not {'answer' if events == select.POLLIN else 'take what was sent'} in time")

    def _lost(self, error: OSError | None = None) -> Closed:
        if self._closed:
            return Closed(f"the connection to {self.peer} was closed here before this was over")
        if error is None:
            return Closed(f"{self.peer} closed the connection: it has ended or died")
        return Closed(f"the connection to {self.peer} is lost: {error}")

    def _enter(self, turn: threading.Lock, deadline: float | None) -> None:
        """Take a turn, to send or to receive, and keep the file descriptor open; `_unuse` and a release end both."""
        if not turn.acquire(blocking=False):
            left = milliseconds(deadline)
            if not turn.acquire(timeout=-1 if left is None else left / 1000):
                raise Late(f"the frame before this one, to or from {self.peer}, was not over in time")
        try:
            self._use()
        except Closed:
            turn.release()
            raise

    def _decrypted(self) -> bool:
        """Whether bytes were decrypted that nobody has read yet."""
        if not self._tls:
            return False
        with self._turn:
            return bool(self._sock.pending())  # type: ignore[attr-defined]

    def _use(self) -> None:
        """Keep the file descriptor open until `_unuse`, so that its number is not reused."""
        with self._guard:
            if self._closed:
                raise Closed(f"the connection to {self.peer} is closed")
            self._users += 1

    def _unuse(self) -> None:
        with self._guard:
            self._users -= 1
            if self._closed and self._users == 0:
                self._sock.close()


def _deadline(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


# -- a new key for a connection ----------------------------------------------------------------------------------------
# TLS 1.3 renews the key with which an end encrypts by a KeyUpdate (RFC 8446, section 4.6.3). OpenSSL leaves that to the
# program, and Python's `ssl` has no call for it. So OpenSSL's own function is called in the library that `ssl` has
# loaded. Its argument is a field of CPython's socket object: it is used only if the fields beside it are the ones that
# they should be, and the connection is refused a new key otherwise.

_NOT_REQUESTED = 0  # the other end keeps its own key
_WORD = ctypes.sizeof(ctypes.c_void_p)
_FIELDS = object.__basicsize__
"""Bytes before the fields of `_ssl._SSLSocket`: a weak reference to the Python socket, OpenSSL's SSL, the context."""


def renew_key(sock: ssl.SSLSocket) -> bool:
    """Send what follows with a new key; False if this interpreter or the connection's state does not allow it.

    The caller sees to it that no other thread uses the connection meanwhile.
    """
    function, connection = _key_update(), sock._sslobj  # type: ignore[attr-defined]
    if function is None or connection is None or sock.version() != "TLSv1.3":
        return False
    context = ctypes.c_void_p.from_address(id(connection) + _FIELDS + 2 * _WORD).value
    if context != id(connection.context):  # another layout
        return False
    pointer = ctypes.c_void_p.from_address(id(connection) + _FIELDS + _WORD).value
    return pointer is not None and function(pointer, _NOT_REQUESTED) == 1


@functools.cache
def _key_update() -> Any:
    """OpenSSL's SSL_key_update; None where `ssl` does not show it."""
    if platform.python_implementation() != "CPython":
        return None
    try:
        import _ssl

        update = ctypes.CDLL(_ssl.__file__).SSL_key_update  # finds the symbols of the libraries that it was linked to
    except (ImportError, AttributeError, OSError):
        return None
    update.argtypes, update.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_int
    return update

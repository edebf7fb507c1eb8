# SPDX-License-Identifier: Apache-2.0
"""Framed tensors between two processes over one TCP connection, with deadlines, and with TLS where that is wanted.

The collectives of :mod:`paceline.communication.torch.transport` need every worker at every operation. A channel joins
just two: one may be late, die or come again without a word to the others. Every wait has a deadline and ends with the
name of the peer: `Closed` when the connection is gone, `Late` when the deadline passed, both `PeerLostError`.

This module makes the connections; what goes over them is in :mod:`~paceline.communication.sockets.frames`, how in
:mod:`~paceline.communication.sockets.framing`, who may in :mod:`~paceline.communication.sockets.tls`. Without
:class:`TLS` whoever reaches the port can speak and listen: only for networks that are the job's own.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from paceline.communication.sockets.frames import HEADER_BYTES, Closed, Frame, FrameHeader, Late
from paceline.communication.sockets.framing import AGAIN, Channel, milliseconds
from paceline.communication.sockets.rejected import neighbourhood, turned_away
from paceline.communication.sockets.tls import TLS
from paceline.errors import MismatchError, UnsupportedError

__all__ = ["HEADER_BYTES", "TLS", "Channel", "Closed", "Frame", "FrameHeader", "Late", "Listener", "connect"]

HANDSHAKE_S = 5.0
"""Seconds that a TLS handshake may take on the listening side."""
STRANGERS = 64
"""Handshakes under way at a listener, at most; for another one the oldest is dropped of the host that has most."""
WELCOME = b"+"
"""What a listener says behind a handshake: in TLS 1.3 a client learns by its first read whether it was taken."""


class Listener:
    """Takes connections at one address of this host.

    Args:
        address: the only address at which it listens; `own_address` finds one.
        tls: None for connections in the clear.
        port: 0 for any that is free.

    Attributes:
        port: where it listens.
    """

    def __init__(self, address: str, tls: TLS | None = None, port: int = 0) -> None:
        self._context = tls.server() if tls else None
        try:
            family, _, _, _, where = socket.getaddrinfo(address or "::", port, type=socket.SOCK_STREAM)[0]
            if ipaddress.ip_address(where[0]).is_unspecified:
                raise UnsupportedError(f"a listener takes one address of this host, got {address!r}: name the address")
            self._sock = socket.create_server((str(where[0]), port), family=family, backlog=128)
        except OSError as error:
            raise UnsupportedError(f"cannot listen at {address}, port {port}: {error}") from error
        self._sock.setblocking(False)
        self.address = address
        self.port: int = self._sock.getsockname()[1]
        self._accepting = threading.Lock()
        self._closed = False
        self._greeting: dict[ssl.SSLSocket, tuple[str, float]] = {}  # handshakes under way: who, and until when

    def accept(self, timeout_s: float) -> Channel:
        """The next connection; with TLS the next one whose handshake was good. A stranger keeps nobody waiting.

        Raises:
            Late: no connection arrived in time.
            Closed: `close` was called.
        """
        deadline = time.monotonic() + timeout_s
        with self._accepting:
            while not self._closed:
                channel = self._knock() or self._greet()
                if channel is not None:
                    return channel
                if time.monotonic() >= deadline:
                    raise Late(f"nobody has connected to {self.address}, port {self.port}, within {timeout_s:g} s")
                self._wait(min(deadline, time.monotonic() + 1.0))
        raise Closed(f"the listener at {self.address}, port {self.port}, is closed")

    def accept_while(self, wanted: Callable[[], bool]) -> Iterator[Channel]:
        """Yield the connections that arrive while `wanted` holds and the listener is open."""
        while wanted():
            try:
                yield self.accept(1.0)
            except Late:
                continue
            except Closed:
                return
            except OSError:  # too many open files, for instance
                time.sleep(0.1)

    def close(self) -> None:
        """Take no more connections; those that were taken stay. May be called from any thread, and again."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends the wait of `accept`
        with self._accepting:
            for sock in [self._sock, *self._greeting]:
                sock.close()
            self._greeting.clear()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _knock(self) -> Channel | None:
        """Take a connection from the queue: a channel, or with TLS a handshake that begins."""
        try:
            sock, where = self._sock.accept()
        except (BlockingIOError, ConnectionError):  # no connection, or closed again
            return None
        except OSError:
            if self._closed:
                return None
            raise
        peer = f"{where[0]}:{where[1]}"
        if self._context is None:
            return Channel(sock, peer)
        sock.setblocking(False)
        if len(self._greeting) >= STRANGERS:
            self._drop(self._most_crowded(), "too many handshakes are under way")
        try:
            tls = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError as error:
            sock.close()
            turned_away(peer, error)
            return None
        self._greeting[tls] = (peer, time.monotonic() + HANDSHAKE_S)
        return None

    def _greet(self) -> Channel | None:
        """Take every handshake as far as it goes; the channel of the first that is over."""
        for sock, (peer, until) in list(self._greeting.items()):
            try:
                sock.do_handshake()
                sock.send(WELCOME)
            except AGAIN:
                if time.monotonic() >= until:
                    self._drop(sock, f"its TLS handshake was not over within {HANDSHAKE_S:g} s")
            except OSError as error:
                self._drop(sock, error)
            else:
                del self._greeting[sock]
                return Channel(sock, peer)
        return None

    def _most_crowded(self) -> ssl.SSLSocket:
        """The oldest handshake of where most come from: one stranger does not push out the workers of other hosts."""
        where = {sock: neighbourhood(peer.rpartition(":")[0]) for sock, (peer, _) in self._greeting.items()}
        most = Counter(where.values()).most_common(1)[0][0]
        return next(sock for sock, place in where.items() if place == most)

    def _drop(self, sock: ssl.SSLSocket, why: object) -> None:
        peer, _ = self._greeting.pop(sock)
        sock.close()
        turned_away(peer, why)

    def _wait(self, until: float) -> None:
        poll = select.poll()
        for sock in [self._sock, *self._greeting]:
            poll.register(sock, select.POLLIN)
        poll.poll(milliseconds(until))


def connect(address: str, port: int, peer: str, timeout_s: float, tls: TLS | None = None) -> Channel:
    """A channel to the listener at `address`, `port`; retries until the deadline.

    Args:
        peer: who that is, for messages.

    Raises:
        Late: no listener accepted before the deadline; the message has the last reason.
        Closed: the other end went away in the TLS handshake.
        MismatchError: the other end does not take this worker's certificate, shows a wrong one, or speaks no TLS.
    """
    deadline = time.monotonic() + timeout_s
    context = tls.client() if tls else None
    pause = 0.01
    while True:
        try:
            sock = _dial(address, port, deadline)
            break
        except OSError as error:
            left = deadline - time.monotonic()
            if left <= pause:
                raise Late(
                    f"{peer} at {address}, port {port}, cannot be reached within {timeout_s:g} s: {error}"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    if context is None:
        return Channel(sock, peer)
    return Channel(_shake_hands(sock, context, f"{peer} at {address}, port {port}", deadline), peer)


def _dial(address: str, port: int, deadline: float) -> socket.socket:
    sock = socket.create_connection((address, port), timeout=max(0.001, deadline - time.monotonic()))
    # Where nobody listens at a port of the range that is given out, a connection can meet itself.
    if sock.getsockname() == sock.getpeername():
        sock.close()
        raise ConnectionRefusedError("nobody listens there")
    return sock


def _shake_hands(sock: socket.socket, context: ssl.SSLContext, who: str, deadline: float) -> ssl.SSLSocket:
    """The client's handshake, to the listener's word of welcome."""
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        secure = context.wrap_socket(sock, do_handshake_on_connect=False)
    except OSError:
        sock.close()
        raise
    try:
        secure.do_handshake()
        secure.settimeout(max(0.001, deadline - time.monotonic()))
        if secure.recv(len(WELCOME)) == WELCOME:
            return secure
        error: Exception = Closed(f"{who} closed the connection behind the TLS handshake")
    except TimeoutError:
        error = Late(f"{who} did not answer the TLS handshake in time")
    except ssl.SSLError as reason:
        error = MismatchError(f"no TLS with {who}: {reason}; are both certificates of the job's authority?")
    except OSError as reason:
        error = Closed(f"the connection to {who} is lost in the TLS handshake: {reason}")
    secure.close()
    raise error

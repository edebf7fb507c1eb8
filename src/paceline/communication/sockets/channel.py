# SPDX-License-Identifier: Apache-2.0
"""Framed tensors between two processes over one TCP connection, with deadlines, and optionally with TLS.

The collectives of :mod:`paceline.communication.torch.transport` need every worker at every operation. A channel joins
just two, and does not involve the other workers. Every wait has a deadline, and its error names the peer: `Closed` if
the connection is gone, `Late` if the deadline has passed; both are `PeerLostError`.

This module makes the connections; :mod:`~paceline.communication.sockets.frames` has the format,
:mod:`~paceline.communication.sockets.framing` sends and receives, :mod:`~paceline.communication.sockets.tls` has the
certificates. Without :class:`TLS` a connection is neither encrypted nor authenticated: use it only on a network of the
job's own.
"""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from paceline.communication.sockets.frames import HEADER_BYTES, Closed, Frame, FrameHeader, Late
from paceline.communication.sockets.framing import AGAIN, Channel, Waker, milliseconds
from paceline.communication.sockets.identity import Identity, handshake_failure, job_refusal
from paceline.communication.sockets.rejected import neighbourhood, turned_away
from paceline.communication.sockets.tls import TLS
from paceline.core import runtime
from paceline.errors import MismatchError, UnsupportedError

__all__ = ["HEADER_BYTES", "TLS", "Channel", "Closed", "Frame", "FrameHeader", "Late", "Listener", "connect", "listen"]

HANDSHAKE_S = 5.0
"""Seconds that a TLS handshake may take at the listener."""
STRANGERS = 64
"""Most handshakes in progress; a further one replaces the oldest of the host that has the most."""
WELCOME = b"+"
"""A listener sends it after a handshake: in TLS 1.3 a client learns by its first read whether it was accepted."""


class Listener:
    """Accepts connections at one address of this host.

    Args:
        address: the only address at which it listens; `own_address` finds one.
        tls: None for unencrypted connections.
        port: 0 for any that is free.

    Attributes:
        port: where it listens.
    """

    def __init__(self, address: str, tls: TLS | None = None, port: int = 0) -> None:
        self._tls = tls
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
        self._handshaking: dict[ssl.SSLSocket, tuple[str, float]] = {}  # handshakes: peer, deadline
        self._adopted: queue.SimpleQueue[tuple[socket.socket, str]] = queue.SimpleQueue()
        self._waker = Waker()

    def accept(self, timeout_s: float) -> Channel:
        """The next connection; with TLS the next one with a complete handshake. Handshakes do not delay each other.

        Raises:
            Late: no connection arrived in time.
            Closed: `close` was called.
        """
        deadline = time.monotonic() + timeout_s
        with self._accepting:
            while not self._closed:
                channel = self._take_adopted() or self._accept() or self._handshakes()
                if channel is not None:
                    return channel
                if time.monotonic() >= deadline:
                    raise Late(f"no peer has connected to {self.address}, port {self.port}, within {timeout_s:g} s")
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
        """Accept no more connections; the accepted ones stay open. From any thread, also repeatedly."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends the wait of `accept`
        with self._accepting:
            for sock in [self._sock, *self._handshaking]:
                sock.close()
            self._handshaking.clear()
            self._waker.close()
            self._drop_adopted()

    def adopt(self, sock: socket.socket, peer: str) -> None:
        """Treat a connection that was made elsewhere like one that has arrived here; from any thread.

        Args:
            sock: connected, and does not block; the listener owns it.
            peer: address and port of the other end.
        """
        self._adopted.put((sock, peer))
        self._waker.wake()
        if self._closed:  # meanwhile
            self._drop_adopted()

    def _drop_adopted(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._adopted.get_nowait()[0].close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> Channel | None:
        """Accept a connection; see `_begin`."""
        try:
            sock, where = self._sock.accept()
        except (BlockingIOError, ConnectionError):  # no connection, or closed again
            return None
        except OSError:
            if self._closed:
                return None
            raise
        return self._begin(sock, f"{where[0]}:{where[1]}")

    def _take_adopted(self) -> Channel | None:
        """Begin with all connections that were adopted, up to the first channel."""
        self._waker.clear()
        channel = None
        with contextlib.suppress(queue.Empty):
            while channel is None:
                channel = self._begin(*self._adopted.get_nowait())
        return channel

    def _begin(self, sock: socket.socket, peer: str) -> Channel | None:
        """A channel, or with TLS the beginning of a handshake."""
        if self._context is None:
            return Channel(sock, peer)
        sock.setblocking(False)
        if len(self._handshaking) >= STRANGERS:
            self._drop(self._oldest_of_busiest(), "too many handshakes are in progress")
        try:
            tls = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError as error:
            sock.close()
            turned_away(peer, error)
            return None
        self._handshaking[tls] = (peer, time.monotonic() + HANDSHAKE_S)
        return None

    def _handshakes(self) -> Channel | None:
        """Continue all handshakes; the channel of the first that completes."""
        for sock, (peer, until) in list(self._handshaking.items()):
            try:
                sock.do_handshake()
                self._check(sock)
                sock.send(WELCOME)
            except AGAIN:
                if time.monotonic() >= until:
                    self._drop(sock, f"its TLS handshake was not over within {HANDSHAKE_S:g} s")
            except ssl.SSLError as error:
                assert self._tls is not None
                self._drop(sock, handshake_failure(error, self._tls.certificate))
            except (OSError, MismatchError) as error:
                self._drop(sock, error)
            else:
                del self._handshaking[sock]
                return Channel(sock, peer)
        return None

    def _check(self, sock: ssl.SSLSocket) -> None:
        assert self._tls is not None
        problem = job_refusal(self._tls.identity, Identity.of(sock))
        if problem:
            raise MismatchError(problem)

    def _oldest_of_busiest(self) -> ssl.SSLSocket:
        """The oldest handshake of the host with the most: one attacker cannot displace workers of other hosts."""
        where = {sock: neighbourhood(peer.rpartition(":")[0]) for sock, (peer, _) in self._handshaking.items()}
        most = Counter(where.values()).most_common(1)[0][0]
        return next(sock for sock, place in where.items() if place == most)

    def _drop(self, sock: ssl.SSLSocket, why: object) -> None:
        peer, _ = self._handshaking.pop(sock)
        sock.close()
        turned_away(peer, why)

    def _wait(self, until: float) -> None:
        poll = select.poll()
        poll.register(self._waker, select.POLLIN)
        for sock in [self._sock, *self._handshaking]:
            poll.register(sock, select.POLLIN)
        poll.poll(milliseconds(until))


def listen(address: str, tls: TLS | None = None, port: int = 0) -> Listener:
    """A listener at `address`, of this process or of its simulated machine."""
    simulated = runtime.network()
    if simulated is None:
        return Listener(address, tls, port)
    made: Listener = simulated.listen(address, port)
    return made


def connect(address: str, port: int, peer: str, timeout_s: float, tls: TLS | None = None) -> Channel:
    """A channel to `peer`, whose listener is at `address`, `port`; retries until the deadline.

    Raises:
        Late: no listener accepted before the deadline; the message has the last reason.
        Closed: the other end closed the connection in the TLS handshake.
        MismatchError: the other end rejects this worker's certificate, has a wrong one, or does not use TLS.
    """
    simulated = runtime.network()
    if simulated is not None:
        made: Channel = simulated.connect(address, port, peer, timeout_s)
        return made
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
    assert tls is not None
    return Channel(_handshake(sock, context, f"{peer} at {address}, port {port}", deadline, tls), peer)


def secure(sock: socket.socket, who: str, peer: str, deadline: float, tls: TLS) -> Channel:
    """A channel over a connection that was made elsewhere, after the client's handshake; see `connect`.

    Args:
        sock: connected; the channel owns it.
        who: the other end and its address, for messages of the handshake.
        peer: its name, for later messages.
        deadline: on the monotonic clock.
        tls: certificates.
    """
    return Channel(_handshake(sock, tls.client(), who, deadline, tls), peer)


def _dial(address: str, port: int, deadline: float) -> socket.socket:
    sock = socket.create_connection((address, port), timeout=max(0.001, deadline - time.monotonic()))
    try:
        # Without a listener at an ephemeral port, a connection can connect to itself.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError("no process listens there")
    except OSError:  # also if the listener has reset it by now
        sock.close()
        raise
    return sock


def _handshake(sock: socket.socket, context: ssl.SSLContext, who: str, deadline: float, tls: TLS) -> ssl.SSLSocket:
    """The client's handshake, up to the listener's WELCOME."""
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        secure = context.wrap_socket(sock, do_handshake_on_connect=False)
    except OSError:
        sock.close()
        raise
    try:
        secure.do_handshake()
        problem = job_refusal(tls.identity, Identity.of(secure))
        if problem:
            raise MismatchError(f"no TLS with {who}: {problem}")
        secure.settimeout(max(0.001, deadline - time.monotonic()))
        if secure.recv(len(WELCOME)) == WELCOME:
            return secure
        error: Exception = Closed(f"{who} closed the connection after the TLS handshake")
    except TimeoutError:
        error = Late(f"{who} did not answer the TLS handshake in time")
    except ssl.SSLError as reason:
        error = MismatchError(f"no TLS with {who}: {handshake_failure(reason, tls.certificate)}")
    except MismatchError as reason:
        error = reason
    except OSError as reason:
        error = Closed(f"the connection to {who} is lost in the TLS handshake: {reason}")
    secure.close()
    raise error

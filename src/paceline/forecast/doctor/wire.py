# SPDX-License-Identifier: Apache-2.0
"""The doctor's own conversation: JSON messages over plain sockets, with a deadline on everything.

A message is its length, four bytes in network order, and so many bytes of JSON. It works where gloo cannot connect, and
nothing that arrives is ever more than JSON. A transfer is chunks, each with its length before it, and an empty one.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

MOST_BYTES = 1 << 20
CHUNK_BYTES = 1 << 18
GUESTS = 1024  # connections at a time
PATIENCE_S = 30.0  # of a server for a peer that says nothing
TCP_NOTSENT_LOWAT = 25  # keeps what waits in our own buffers out of the measurement
LENGTH = struct.Struct(">I")


def send(peer: socket.socket, value: dict[str, Any]) -> None:
    """Send one message."""
    body = json.dumps(value).encode()
    peer.sendall(LENGTH.pack(len(body)) + body)


def receive(peer: socket.socket) -> dict[str, Any]:
    """Receive one message; raises OSError where what comes is not one."""
    size = LENGTH.unpack(_exactly(peer, LENGTH.size))[0]
    if size > MOST_BYTES:
        raise ConnectionError(f"a message of {size} bytes is none of ours")
    try:
        value = json.loads(_exactly(peer, size))
    except ValueError as error:
        raise ConnectionError("what came was not JSON") from error
    if not isinstance(value, dict):
        raise ConnectionError("what came was not a message")
    return value


def _exactly(peer: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = peer.recv(size - len(parts))
        if not part:
            raise ConnectionError("the connection was closed")
        parts += part
    return bytes(parts)


class Server:
    """Answers the other workers, each in a thread of its own, as long as this process lives.

    Args:
        rank: who we are.
        token: of this examination, so that nobody takes another process for one of ours.
    """

    def __init__(self, rank: int, token: str) -> None:
        self.rank, self.token = rank, token
        self._guests = threading.Semaphore(GUESTS)
        self._socket = socket.create_server(("", 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="doctor", daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            if not self._guests.acquire(blocking=False):
                peer.close()
                continue
            threading.Thread(target=self._serve, args=(peer,), name="doctor-peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            self._converse(peer)
        finally:
            self._guests.release()

    def _converse(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError, KeyError):
            tune(peer, PATIENCE_S)
            if receive(peer)["token"] != self.token:
                return
            send(peer, {"rank": self.rank})
            while True:
                what = receive(peer)["do"]
                if what == "ping":
                    send(peer, {"time_s": time.time()})
                elif what == "take":
                    send(peer, {"bytes_s": _take(peer)})


def _take(peer: socket.socket) -> float:
    """Swallow chunks to the empty one; bytes a second, without the first fifth of the time, in which TCP finds its
    pace."""
    room = bytearray(CHUNK_BYTES)
    marks: list[tuple[float, int]] = []
    total = 0
    while True:
        left = LENGTH.unpack(_exactly(peer, LENGTH.size))[0]
        if not left:
            break
        while left:
            count = peer.recv_into(room, min(left, CHUNK_BYTES))
            if not count:
                raise ConnectionError("the connection was closed")
            left -= count
            total += count
            marks.append((time.monotonic(), total))
    return _pace(marks)


def _pace(marks: Sequence[tuple[float, int]]) -> float:
    if len(marks) < 2:
        return 0.0
    (began, _), (ended, total) = marks[0], marks[-1]
    start = next(mark for mark in marks if mark[0] >= began + 0.2 * (ended - began))
    if ended <= start[0]:
        start = marks[0]
    return (total - start[1]) / max(1e-9, ended - start[0])


def tune(peer: socket.socket, timeout_s: float) -> None:
    """Small messages at once, little in our own buffers, and a deadline."""
    peer.settimeout(timeout_s)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        peer.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, CHUNK_BYTES)


def call(address: str, port: int, target: int, token: str, timeout_s: float) -> socket.socket:
    """Connect to a worker and make sure that it is the one; raises OSError."""
    peer = socket.create_connection((address, port), timeout=timeout_s)
    try:
        tune(peer, timeout_s)
        send(peer, {"token": token})
        answered = receive(peer).get("rank")
        if answered != target:
            raise ConnectionError(f"rank {answered} answers there")
    except BaseException:
        peer.close()
        raise
    return peer


def ping(peer: socket.socket) -> tuple[float, float]:
    """Round trip, and the peer's clock minus ours, which is right within half of it; seconds."""
    began, clock = time.perf_counter(), time.time()
    send(peer, {"do": "ping"})
    theirs = float(receive(peer)["time_s"])
    trip = time.perf_counter() - began
    return trip, theirs - (clock + trip / 2)


def give(peer: socket.socket, seconds: float) -> float:
    """Send as fast as the peer takes it for so long; bytes a second as the peer saw them."""
    send(peer, {"do": "take"})
    chunk = LENGTH.pack(CHUNK_BYTES) + bytes(CHUNK_BYTES)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        peer.sendall(chunk)
    peer.sendall(LENGTH.pack(0))
    return float(receive(peer)["bytes_s"])

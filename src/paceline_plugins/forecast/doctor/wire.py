# SPDX-License-Identifier: Apache-2.0
"""The doctor's protocol: JSON messages over plain sockets, with a deadline on every operation.

A message is its length, four bytes in network order, and that many bytes of JSON. It works where gloo cannot connect,
and only JSON is accepted. A transfer is chunks, each after its length, and an empty chunk.
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
MAX_CONNECTIONS = 1024
IDLE_TIMEOUT_S = 30.0
TCP_NOTSENT_LOWAT = 25  # keeps data in send buffers out of the measurement
LENGTH = struct.Struct(">I")


def send(peer: socket.socket, value: dict[str, Any]) -> None:
    """Send one message."""
    body = json.dumps(value).encode()
    peer.sendall(LENGTH.pack(len(body)) + body)


def receive(peer: socket.socket) -> dict[str, Any]:
    """Receive one message; raises OSError for other data."""
    size = LENGTH.unpack(_exactly(peer, LENGTH.size))[0]
    if size > MOST_BYTES:
        raise ConnectionError(f"a message of {size} bytes is too long")
    try:
        value = json.loads(_exactly(peer, size))
    except ValueError as error:
        raise ConnectionError("the message is not JSON") from error
    if not isinstance(value, dict):
        raise ConnectionError("the message is not a JSON object")
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
    """Answers other workers, each in a thread of its own.

    Args:
        rank: of this worker.
        token: of this examination, which other processes do not know.
    """

    def __init__(self, rank: int, token: str) -> None:
        self.rank, self.token = rank, token
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        self._socket = socket.create_server(("", 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="doctor", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            if not self._free.acquire(blocking=False):
                peer.close()
                continue
            threading.Thread(target=self._serve, args=(peer,), name="doctor-peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            self._answer(peer)
        finally:
            self._free.release()

    def _answer(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError, KeyError):
            set_options(peer, IDLE_TIMEOUT_S)
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
    """Receive a transfer; bytes a second, without the first fifth of the time, in which TCP slow-starts."""
    buffer = bytearray(CHUNK_BYTES)
    marks: list[tuple[float, int]] = []
    total = 0
    while True:
        left = LENGTH.unpack(_exactly(peer, LENGTH.size))[0]
        if not left:
            break
        while left:
            count = peer.recv_into(buffer, min(left, CHUNK_BYTES))
            if not count:
                raise ConnectionError("the connection was closed")
            left -= count
            total += count
            marks.append((time.monotonic(), total))
    return _bandwidth(marks)


def _bandwidth(marks: Sequence[tuple[float, int]]) -> float:
    if len(marks) < 2:
        return 0.0
    (began, _), (ended, total) = marks[0], marks[-1]
    start = next(mark for mark in marks if mark[0] >= began + 0.2 * (ended - began))
    if ended <= start[0]:
        start = marks[0]
    return (total - start[1]) / max(1e-9, ended - start[0])


def set_options(peer: socket.socket, timeout_s: float) -> None:
    """Send small messages at once, keep little in send buffers, and set a deadline."""
    peer.settimeout(timeout_s)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        peer.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, CHUNK_BYTES)


def connect(address: str, port: int, target: int, token: str, timeout_s: float) -> socket.socket:
    """Connect to a worker and check its rank; raises OSError."""
    peer = socket.create_connection((address, port), timeout=timeout_s)
    try:
        set_options(peer, timeout_s)
        send(peer, {"token": token})
        answered = receive(peer).get("rank")
        if answered != target:
            raise ConnectionError(f"rank {answered} answers there")
    except BaseException:
        peer.close()
        raise
    return peer


def ping(peer: socket.socket) -> tuple[float, float]:
    """Seconds of a round trip, and the peer's clock minus ours, with an error of at most half the round trip."""
    began, clock = time.perf_counter(), time.time()
    send(peer, {"do": "ping"})
    theirs = float(receive(peer)["time_s"])
    trip = time.perf_counter() - began
    return trip, theirs - (clock + trip / 2)


def measure_bandwidth(peer: socket.socket, seconds: float) -> float:
    """Send as fast as the peer receives, for so many seconds; bytes a second as the peer measured them."""
    send(peer, {"do": "take"})
    chunk = LENGTH.pack(CHUNK_BYTES) + bytes(CHUNK_BYTES)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        peer.sendall(chunk)
    peer.sendall(LENGTH.pack(0))
    return float(receive(peer)["bytes_s"])

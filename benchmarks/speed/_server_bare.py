# SPDX-License-Identifier: Apache-2.0
"""The least that a push and a pull can cost in Python: the frames' bytes over one socket, and nothing else.

One end sends a header of 88 bytes and a body for each piece, and receives as much for each; the other one receives a
piece, and sends it back. No locks, no threads, no checks, no optimizer.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

import torch.distributed as dist

from paceline.communication.sockets.frames import HEADER_BYTES, advance
from paceline.communication.sockets.framing import set_options


def connect(rank: int) -> socket.socket:
    """A connection between ranks 0 and 1."""
    port = [0]
    if rank == 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port[0] = server.getsockname()[1]
            dist.broadcast_object_list(port, 1)
            sock, _ = server.accept()
    else:
        dist.broadcast_object_list(port, 1)
        sock = socket.create_connection(("127.0.0.1", port[0]))
    set_options(sock)
    return sock


class Bare:
    """One end: `push` at rank 0 and `answer` at rank 1 belong together.

    Args:
        sock: from `connect`.
        there: the bytes of each piece.
        back: memory for them.
    """

    def __init__(self, sock: socket.socket, there: Sequence[memoryview], back: Sequence[memoryview]) -> None:
        self._sock, self._there, self._back = sock, there, back
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._in, self._either = select.poll(), select.poll()
        self._in.register(sock, select.POLLIN)
        self._either.register(sock, select.POLLIN | select.POLLOUT)

    def push(self) -> None:
        """Send all pieces, and receive them, both at once."""
        out = [part for piece in self._there for part in (self._head, piece)]
        wanted = [part for piece in self._back for part in (self._head, piece)]
        sent = got = 0
        while got < len(wanted):
            try:
                if sent < len(out):
                    sent += _step(out, sent, self._sock.sendmsg(out[sent : sent + 16]))
            except BlockingIOError:
                self._either.poll()
            try:
                while got < len(wanted):
                    got += _step(wanted, got, self._sock.recv_into(wanted[got]))
            except BlockingIOError:
                if sent == len(out):
                    self._in.poll()

    def answer(self) -> None:
        """Receive each piece, and send it back."""
        for piece in self._back:
            both, got, sent = [self._head, piece], 0, 0
            while got < 2:
                try:
                    got += _step(both, got, self._sock.recv_into(both[got]))
                except BlockingIOError:
                    self._in.poll()
            both = [self._head, piece]
            while sent < 2:
                try:
                    sent += _step(both, sent, self._sock.sendmsg(both[sent:]))
                except BlockingIOError:
                    select.select([], [self._sock], [])


def _step(parts: list[memoryview], first: int, size: int) -> int:
    """How many parts from `first` on are done by `size` bytes; cuts the next one."""
    if not size:
        raise EOFError("the other end is gone")
    return advance(parts, first, size)

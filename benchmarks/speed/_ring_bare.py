# SPDX-License-Identifier: Apache-2.0
"""The ring algorithm over bare sockets: one thread, no frames, no checks. What a ring in Python can reach at most."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

PIECE, BLOCK = 1 << 20, 1 << 18
"""Bytes that are handed on together, and that are added at a time, while they lie in a core's cache."""
POLL_MS = 60_000


class Part(NamedTuple):
    """Bytes `begin` to `end` of the tensor in step `step`."""

    begin: int
    end: int
    step: int


def neighbours(rank: int, size: int, address: str, share: Callable[[str], list[str]]) -> tuple[socket.socket, ...]:
    """Connections from the left and to the right; `share` gives every worker's word, in rank order."""
    with socket.create_server((address, 0)) as listener:
        host, port = share(f"{address} {listener.getsockname()[1]}")[(rank + 1) % size].split()
        right = socket.create_connection((host, int(port)), POLL_MS / 1000)
        left, _ = listener.accept()
    for sock in (left, right):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
    return left, right


class BareRing:
    """An all-reduce of one float32 tensor among `size` workers.

    Args:
        x: one-dimensional; each `all_reduce` sums it in place.
        rank: this worker's place.
        size: number of workers.
        left: the connection from the worker before.
        right: the connection to the worker after.
    """

    def __init__(self, x: Tensor, rank: int, size: int, left: socket.socket, right: socket.socket) -> None:
        self._left, self._right, self._adding = left, right, size - 1
        self._x, self._bytes = x, memoryview(x.view(torch.uint8).numpy())
        ends = [4 * (one.storage_offset() + one.numel()) for one in x.tensor_split(size)]
        cuts = list(zip([0, *ends[:-1]], ends, strict=True))
        steps = range(2 * (size - 1))
        self._outs = [part for t in steps for part in _parts(*cuts[(rank - t) % size], t)]
        self._ins = [part for t in steps for part in _parts(*cuts[(rank - 1 - t) % size], t)]
        self._first = sum(part.step == 0 for part in self._outs)
        self._block = torch.empty(BLOCK, dtype=torch.uint8)
        self._poll = select.poll()

    def all_reduce(self) -> None:
        """Sum; both directions move as the sockets allow."""
        self._arrived = 0
        senders, takers = self._sending(), self._taking()
        sends = takes = True
        while sends or takes:
            moved = False
            if takes:
                took = next(takers, None)
                takes, moved = took is not None, bool(took)
            if sends:
                sent = next(senders, None)
                sends, moved = sent is not None, moved or bool(sent)
            if not moved and (sends or takes):
                self._wait(takes, sends)

    def _wait(self, takes: bool, sends: bool) -> None:
        self._poll.register(self._left, select.POLLIN if takes else 0)
        self._poll.register(self._right, select.POLLOUT if sends and self._may_send else 0)
        if not self._poll.poll(POLL_MS):
            raise TimeoutError("a neighbour does nothing")

    def _sending(self) -> Iterator[bool]:
        """Yields whether something was sent, until all is."""
        for number, (begin, end, _) in enumerate(self._outs):
            while begin < end:
                self._may_send = number < self._first + self._arrived
                try:
                    sent = self._right.send(self._bytes[begin:end]) if self._may_send else 0
                except BlockingIOError:
                    sent = 0
                begin += sent
                yield sent > 0

    def _taking(self) -> Iterator[bool]:
        """Yields whether something arrived, until all has."""
        block, memory = self._block, memoryview(self._block.numpy())
        for begin, end, step in self._ins:
            while begin < end:
                size = min(BLOCK, end - begin)
                place = memory[:size] if step < self._adding else self._bytes[begin : begin + size]
                while place.nbytes:
                    try:
                        place = place[self._left.recv_into(place) :]
                        yield True
                    except BlockingIOError:
                        yield False
                if step < self._adding:
                    self._x[begin // 4 : (begin + size) // 4].add_(block[:size].view(torch.float32))
                begin += size
            self._arrived += 1


def _parts(begin: int, end: int, step: int) -> list[Part]:
    return [Part(k, min(k + PIECE, end), step) for k in range(begin, end, PIECE)]

# SPDX-License-Identifier: Apache-2.0
"""A worker's line to each owner: questions in order, and their answers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.communication.sockets.channel import Channel, Frame, Header
from paceline.errors import PeerLostError
from paceline.update.server.protocol import Ask, Ticket
from paceline.update.server.rendezvous import HELLO
from paceline.update.server.shard_updates import Settings

if TYPE_CHECKING:
    from paceline.update.server.socket_service import ThreadedService

SETTINGS, PUSH, PULL, ANSWER, STILL_HERE, REPLICA, OUT, CLOCKS, FINISH, BYE = range(HELLO + 1, HELLO + 11)
LEASE, LEASED, LEFT, ENDS, DONE, WAITS, HOLDS, REST = range(BYE + 1, BYE + 9)
MARKS, KEPT, SECURE, SAFE, ALIVE, HERE = range(REST + 1, REST + 7)
"""Kinds of frames."""
LEDGER = (LEASE, LEFT, ENDS, DONE, WAITS, HOLDS)
"""What is for the keeper of the ledger."""


class Line:
    """Questions to one worker, in order, and its answers: one thread sends what there is, and takes what has come.

    Args:
        service: whose line it is.
        rank: of the other worker.
        channel: the connection.
    """

    def __init__(self, service: ThreadedService, rank: int, channel: Channel) -> None:
        self.rank, self.channel, self._service = rank, channel, service
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._settings: dict[int, Settings] = {}
        self._marked = 0  # the exchange whose places were said last
        self.spoke_at = self._since = self.said_at = time.monotonic()
        self._open, self._counting = 0, threading.Lock()
        self._over, self._left = False, threading.Event()
        self._bell, self._ear = socket.socketpair()  # ends the wait for an answer when there is something to send
        self._bell.setblocking(False)
        self._ear.setblocking(False)

    def ask(self, ticket: Ticket, ask: Ask) -> None:
        """Send a question when those before it are gone."""
        self._opened()
        self._put(lambda: self._send(ticket, ask))

    def beat(self) -> None:
        """Say that this process lives; its program says nothing by that."""
        self.spoke_at = time.monotonic()
        self._put(lambda: self._write(ALIVE, (), None, None))

    def inquire(self, kind: int, numbers: tuple[int, ...]) -> None:
        """Send a question that is only numbers, and so is its answer."""
        self._opened()
        self._put(lambda: self._write(kind, numbers, None, None))

    def _opened(self) -> None:
        """A question is on its way."""
        self.spoke_at = self.said_at = time.monotonic()
        with self._counting:
            if self._open == 0:
                self._since = time.monotonic()
            self._open += 1

    def say(self, kind: int, numbers: tuple[int, ...], body: Tensor | None = None, note: Any = None) -> None:
        """Send a word that has no answer."""
        self.spoke_at = self.said_at = time.monotonic()
        self._put(lambda: self._write(kind, numbers, body, note))

    def flush(self, timeout_s: float) -> None:
        """Wait until all that was said has left; once, at the end."""
        self._put(self._left.set)
        self._left.wait(timeout_s)

    def _put(self, send: Callable[[], None]) -> None:
        self._queue.put(send)
        with contextlib.suppress(OSError):  # full of rings that were not heard yet, or closed
            self._bell.send(b"!")

    @property
    def waiting_since(self) -> float | None:
        """When it said something last, while an answer is due; None where none is."""
        with self._counting:
            return self._since if self._open else None

    def _send(self, ticket: Ticket, ask: Ask) -> None:
        if ask.values is None:
            self._write(PULL, (ask.piece, ticket.number, int(ticket.looks)), None, None)
            return
        settings = ticket.settings.get(ask.span, {})
        if self._settings.get(ask.span) != settings:
            self._settings[ask.span] = settings
            self._write(SETTINGS, (ask.span,), None, settings)
        if ticket.marks and self._marked != ticket.number:
            self._marked = ticket.number
            self._write(MARKS, (ticket.number,), None, ticket.marks)
        wants = int(ask.out is not None)
        numbers = (ask.piece, ticket.clock, ask.version, ticket.minibatches, ticket.number, ask.span, wants)
        self._write(PUSH, numbers, ask.values, None)

    def _write(self, kind: int, numbers: tuple[int, ...], body: Tensor | None, note: Any) -> None:
        self._service.send(self.channel, kind, numbers, body, note, meanwhile=self._receive)

    def run(self) -> None:
        """The body of its thread."""
        try:
            while not self._over:
                if self._send_next():
                    if self.channel.readable():
                        self._receive()
                elif self.channel.wait(self._ear):
                    self._receive()
                else:
                    with contextlib.suppress(OSError):
                        self._ear.recv(4096)
        except PeerLostError as error:
            self._service.cut_off(self.rank, str(error))
        finally:
            self._left.set()  # nothing leaves any more
            self._bell.close()
            self._ear.close()

    def _send_next(self) -> bool:
        try:
            send = self._queue.get_nowait()
        except Empty:
            return False
        send()
        return True

    def _place(self, header: Header) -> Tensor:
        asked = header.kind == ANSWER and self.rank not in self._service.members.lost
        ticket = self._service.ticket(header.numbers[3]) if asked else None
        ask = ticket.ask(header.numbers[0]) if ticket is not None else None
        return ask.out if ask is not None and ask.out is not None else fresh(header)

    def _receive(self) -> None:
        frame = self.channel.receive(self._place)
        with self._counting:
            self._since = time.monotonic()
            self._open -= frame.kind in (ANSWER, LEASED)
        if frame.kind == OUT:
            self._service.told(frame.numbers[0], str(frame.note), bool(frame.numbers[1]))
        elif frame.kind == ANSWER:
            piece, version, delay, number, safe = frame.numbers[:5]
            self._service.safekeeping.safe(self.rank, [(piece, safe)])
            self._service.answer(number, piece, version, delay, frame.note, self.rank)
        elif frame.kind == KEPT:
            self._service.safekeeping.replica_kept(self.rank, *frame.numbers[:2])
        elif frame.kind == LEASED:
            self._service.desk.answered(frame.numbers)

    def close(self) -> None:
        """Close the connection; the thread ends."""
        self._over = True
        self._put(_nothing)
        self.channel.close()


class OwnLine(Line):
    """Questions of a worker to itself: they go over no wire, and neither does it wait for them."""

    def __init__(self, service: ThreadedService, rank: int) -> None:
        self.rank, self._service = rank, service
        self._queue = SimpleQueue()
        self._settings = {}
        self._open, self._counting = 0, threading.Lock()
        self._since = time.monotonic()
        self._over, self._left = False, threading.Event()

    def _put(self, send: Callable[[], None]) -> None:
        self._queue.put(send)

    def _send(self, ticket: Ticket, ask: Ask) -> None:
        self._service.serve_own(ticket, ask)

    def _write(self, kind: int, numbers: tuple[int, ...], body: Tensor | None, note: Any) -> None:
        """To oneself nothing has to be said, but to the keeper of the ledger."""
        if kind == REST:
            self._service.rests(self.rank)
        elif kind in LEDGER:
            self._service.desk.handle(self.rank, None, Frame(kind, numbers, None, note))

    def run(self) -> None:
        """The body of its thread."""
        while not self._over:
            self._queue.get()()

    def close(self) -> None:
        """End the thread."""
        self._over = True
        self._put(_nothing)


def _nothing() -> None:
    """Said only to be heard."""


def fresh(header: Header) -> Tensor:
    """Memory for a body that nothing was prepared for."""
    return torch.empty(header.numel, dtype=header.dtype)

# SPDX-License-Identifier: Apache-2.0
"""A worker's line to each owner: questions in order, and their answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.asynchronous.meeting import HELLO
from paceline.asynchronous.service import Ask, Ticket
from paceline.asynchronous.ways import Settings
from paceline.errors import PeerLostError
from paceline.transport.channel import Channel, Header

if TYPE_CHECKING:
    from paceline.asynchronous.threads import ThreadedService

SETTINGS, PUSH, PULL, ANSWER, STILL_HERE, REPLICA, OUT, CLOCKS, FINISH, BYE = range(HELLO + 1, HELLO + 11)
"""Kinds of frames."""


class Line:
    """Questions to one worker, in order, and its answers."""

    def __init__(self, service: ThreadedService, rank: int, channel: Channel) -> None:
        self.rank, self.channel, self._service = rank, channel, service
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._settings: dict[int, Settings] = {}
        self._since = self.said_at = time.monotonic()
        self._open, self._counting = 0, threading.Lock()

    def bodies(self) -> list[Callable[[], None]]:
        """What its threads do."""
        return [self._send_all, self._receive_all]

    def ask(self, ticket: Ticket, ask: Ask) -> None:
        """Send a question when those before it are gone."""
        self.said_at = time.monotonic()
        with self._counting:
            if self._open == 0:
                self._since = time.monotonic()
            self._open += 1
        self._queue.put(lambda: self._send(ticket, ask))

    def say(self, kind: int, numbers: tuple[int, ...], body: Tensor | None = None, note: Any = None) -> None:
        """Send a word that has no answer."""
        self.said_at = time.monotonic()
        self._queue.put(lambda: self._write(kind, numbers, body, note))

    def flush(self, timeout_s: float) -> None:
        """Wait until all that was said has left."""
        left = threading.Event()
        self._queue.put(left.set)
        left.wait(timeout_s)

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
        wants = int(ask.out is not None)
        numbers = (ask.piece, ticket.clock, ask.version, ticket.minibatches, ticket.number, ask.span, wants)
        self._write(PUSH, numbers, ask.values, None)

    def _write(self, kind: int, numbers: tuple[int, ...], body: Tensor | None, note: Any) -> None:
        before = self.channel.bytes_sent
        self.channel.send(kind, numbers, body, note, deadline_s=self._service.timeout_s)
        self._service.count(self.channel.bytes_sent - before)

    def _send_all(self) -> None:
        while (send := self._queue.get()) is not None:
            try:
                send()
            except PeerLostError as error:
                self._service.cut_off(self.rank, str(error))
                return

    def _receive_all(self) -> None:
        def place(header: Header) -> Tensor:
            ticket = self._service.ticket(header.numbers[3]) if header.kind == ANSWER else None
            ask = ticket.ask(header.numbers[0]) if ticket is not None else None
            return ask.out if ask is not None and ask.out is not None else fresh(header)

        while not self._service.closing:
            try:
                frame = self.channel.receive(place)
            except PeerLostError as error:
                self._service.cut_off(self.rank, str(error))
                return
            with self._counting:
                self._since = time.monotonic()
                self._open -= frame.kind == ANSWER
            if frame.kind == OUT:
                self._service.told(frame.numbers[0], str(frame.note))
            elif frame.kind == ANSWER:
                piece, version, delay, number = frame.numbers[:4]
                self._service.answer(number, piece, version, delay)

    def close(self) -> None:
        """Close the connection; both threads end."""
        self._queue.put(None)
        self.channel.close()


class OwnLine(Line):
    """Questions of a worker to itself: they go over no wire, and neither does it wait for them."""

    def __init__(self, service: ThreadedService, rank: int) -> None:
        self.rank, self._service = rank, service
        self._queue = SimpleQueue()
        self._settings = {}
        self._open, self._counting = 0, threading.Lock()
        self._since = time.monotonic()

    def bodies(self) -> list[Callable[[], None]]:
        return [self._send_all]

    def _send(self, ticket: Ticket, ask: Ask) -> None:
        self._service.serve_own(ticket, ask)

    def _write(self, kind: int, numbers: tuple[int, ...], body: Tensor | None, note: Any) -> None:
        """Nothing has to be said to oneself."""

    def close(self) -> None:
        self._queue.put(None)


def fresh(header: Header) -> Tensor:
    """Memory for a body that nothing was prepared for."""
    return torch.empty(header.numel, dtype=header.dtype)

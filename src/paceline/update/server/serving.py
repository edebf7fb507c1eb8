# SPDX-License-Identifier: Apache-2.0
"""What one worker asks of this one: a thread takes its questions in order, and answers them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.communication.sockets.channel import Channel, Frame, Header
from paceline.data.ledger.epoch_ledger import Mark
from paceline.errors import MismatchError, PeerLostError
from paceline.update.server.membership import LOOK_EVERY_S
from paceline.update.server.peer import (
    ANSWER,
    BYE,
    CLOCKS,
    FINISH,
    HERE,
    KEPT,
    LEDGER,
    MARKS,
    OUT,
    PULL,
    PUSH,
    REPLICA,
    REST,
    SAFE,
    SECURE,
    SETTINGS,
    STILL_HERE,
    fresh,
)
from paceline.update.server.shard import NOBODY
from paceline.update.server.shard_updates import Arriving, Settings

if TYPE_CHECKING:
    from paceline.update.server.socket_service import ThreadedService

BACKGROUND = (SAFE, REPLICA, CLOCKS, OUT)
"""What is said without a word of the sender's program; and so is ALIVE, which is for nobody."""


class _Spaces:
    """Buffers of one thread, kept and touched: the first write to new memory costs more than the network."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype, str], Tensor] = {}

    def like(self, anchor: Tensor, use: str) -> Tensor:
        key = (anchor.numel(), anchor.dtype, use)
        if key not in self._kept:
            self._kept[key] = torch.zeros_like(anchor)
        return self._kept[key]


class Serving:
    """Answers one worker until it leaves; `run` is the body of a thread.

    Args:
        service: whose pieces are asked for.
        rank: of the worker that asks.
        channel: the connection that it has made.
    """

    def __init__(self, service: ThreadedService, rank: int, channel: Channel) -> None:
        self._service, self._rank, self._channel = service, rank, channel
        self._server, self._members = service.server, service.members
        self._spaces, self._settings = _Spaces(), dict[int, Settings]()
        self._marks: tuple[int, list[Mark]] = (0, [])  # an exchange, and the places that go with its pushes

    def run(self) -> None:
        """Take frames until the connection ends."""
        try:
            while not self._service.closing:
                frame = self._channel.receive(self._place)
                if self._rank in self._members.lost:  # what it says no longer counts
                    return
                if frame.kind not in BACKGROUND:
                    self._members.acted[self._rank] = time.monotonic()
                self._handle(frame)
        except PeerLostError as error:
            self._service.cut_off(self._rank, str(error))

    def _place(self, header: Header) -> Tensor:
        if header.kind != PUSH:
            return fresh(header)
        return self._spaces.like(self._anchor(header.numbers[0]), "in")

    def _anchor(self, piece: int) -> Tensor:
        if piece not in self._server.pieces:
            raise MismatchError(self._service.sign(f"was asked for piece {piece}, which belongs to another worker"))
        return self._server.pieces[piece].anchor

    def _handle(self, frame: Frame) -> None:
        service, numbers = self._service, frame.numbers
        if frame.kind == SETTINGS:
            self._settings[numbers[0]] = frame.note
        elif frame.kind == MARKS:
            self._marks = numbers[0], frame.note
        elif frame.kind == PUSH:
            self._take_push(frame)
        elif frame.kind == PULL:
            piece, ticket, looks = numbers[:3]
            out = self._spaces.like(self._anchor(piece), "out")
            version = self._server.read(piece, NOBODY if looks else self._rank, out, after_push=False)
            self._answer(piece, version, 0, ticket, out)
        elif frame.kind == REPLICA:
            assert frame.body is not None
            self._server.keep_replica(frame.note, frame.body)
            service.send(self._channel, KEPT, numbers[:2])
        elif frame.kind == SECURE:
            service.safekeeping.wanted(self._rank)
        elif frame.kind == SAFE:
            service.safekeeping.safe(self._rank, frame.note)
        elif frame.kind == CLOCKS:
            service.ticked(self._rank, frame.note)
        elif frame.kind == OUT:
            service.told(numbers[0], str(frame.note), bool(numbers[1]))
        elif frame.kind in LEDGER:
            service.desk.handle(self._rank, self._channel, frame)
        elif frame.kind == REST:
            service.rests(self._rank)
        elif frame.kind in (FINISH, BYE, HERE):
            service.says(self._rank, frame.kind, numbers[0])

    def _take_push(self, frame: Frame) -> None:
        piece, clock, version, minibatches, ticket, span, answered_with_values = frame.numbers[:7]
        assert frame.body is not None
        marks = self._marks[1] if self._marks[0] == ticket else ()
        arriving = Arriving(self._rank, clock, version, minibatches, self._settings.get(span, {}), marks)
        out = self._spaces.like(frame.body, "out") if answered_with_values else None
        answer = self._service.push(piece, frame.body, arriving, out)
        if not answer.may_start:
            self._hold_back(piece)
        answered = self._server.read(piece, self._rank, out, after_push=True)
        self._answer(piece, answered, answer.delay, ticket, out)
        self._service.safekeeping.applied(piece)

    def _answer(self, piece: int, version: int, delay: int, ticket: int, out: Tensor | None) -> None:
        safe = self._service.safekeeping.up_to(piece, self._rank)
        news = self._server.news(piece, self._rank)
        self._service.send(self._channel, ANSWER, (piece, version, delay, ticket, safe), out, news)

    def _hold_back(self, piece: int) -> None:
        """Wait until the slowest have caught up; its sender hears now and then that this worker lives."""
        said = time.monotonic()
        while self._service.held_back(piece, self._rank):
            self._members.heard[self._rank] = now = time.monotonic()  # what it says is not read meanwhile
            self._members.acted[self._rank] = now
            if now - said > LOOK_EVERY_S:
                self._service.send(self._channel, STILL_HERE, (piece,))
                said = now

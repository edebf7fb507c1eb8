# SPDX-License-Identifier: Apache-2.0
"""What workers say to each other: requests to the owners of shards, frames, and which frames are malformed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor

from paceline.communication.sockets.channel import Frame
from paceline.data.ledger.epoch_ledger import ENDLESS, Mark
from paceline.errors import MismatchError
from paceline.update.server.shard import LEDGER_SHARD, REFUSED, GroupSettings, IncomingPush


@dataclass
class ShardRequest:
    """One shard's part of an exchange."""

    shard: int  # its number
    span: int  # number of the span, whose settings go with it
    values: Tensor | None  # the push, shape (n,), unchanged until the exchange is over; None for a pull
    out: Tensor | None  # memory for the answer, shape (n,); None where no values are wanted
    version: int  # of the values at which `values` were computed; afterwards, of the answer
    news: Any = None  # the ledger's news that came with the answer


@dataclass
class PendingExchange:
    """An exchange under way."""

    number: int  # of this exchange among the worker's
    requests: dict[int, ShardRequest]  # shard -> its part
    clock: int = 0  # the clock that the worker reaches with this push; 0 for a bare pull
    minibatches: int = 1  # that the push counts for
    peeks: bool = False  # whether no gradient will be computed at the values of a bare pull
    settings: dict[int, GroupSettings] = field(default_factory=dict)  # of the optimizers' groups, by span
    marks: list[Mark] = field(default_factory=list)  # sample ranges that the push was computed on
    release: Callable[[], None] = lambda: None  # called when the pushed values are not needed any more
    # whether its requests were sent; a delayed pull may be sent by a timer, or earlier
    requested: bool = field(default=False, init=False)
    requested_at: float = field(default=0.0, init=False)  # seconds on the service's clock
    answered_at: float = field(default=0.0, init=False)  # seconds on the service's clock
    delay: int = field(default=0, init=False)  # the largest delay of its shards
    done: bool = field(default=False, init=False)  # whether all requests are answered
    refused: bool = field(default=False, init=False)  # whether an owner refused a push
    _answered: set[int] = field(default_factory=set, init=False)

    def request(self, shard: int) -> ShardRequest | None:
        """The request to `shard`, if it is not answered yet."""
        return None if shard in self._answered else self.requests.get(shard)

    def answered(self, shard: int, version: int, delay: int, news: Any = None) -> None:
        """Note an answer, whose values have been received."""
        request = self.request(shard)
        if request is None:
            return
        request.version, request.news = version, news
        self.refused = self.refused or delay == REFUSED
        if request.values is not None:
            self.delay = max(self.delay, delay)
        self._answered.add(shard)
        self.done = len(self._answered) == len(self.requests)

    def incoming(self, sender: int, request: ShardRequest) -> IncomingPush:
        """The description of one shard's push for its owner."""
        settings = self.settings.get(request.span, {})
        return IncomingPush(sender, self.clock, request.version, self.minibatches, settings, self.marks)

    @property
    def counts_samples(self) -> bool:
        """Whether it pushes to the first shard, whose pushes count the samples."""
        request = self.requests.get(LEDGER_SHARD)
        return request is not None and request.values is not None

    @property
    def waiting(self) -> list[ShardRequest]:
        """The requests that are not answered."""
        return [request for shard, request in self.requests.items() if shard not in self._answered]


class FrameKind(IntEnum):
    """What a frame contains.

    The first frame of a connection is `HELLO`. Requests are `PUSH` and `PULL`, whose answer is `ANSWER`, and `LEASE`,
    whose answer is `LEASED`. All other frames have no answer.
    """

    HELLO = 1
    SETTINGS = 2
    PUSH = 3
    PULL = 4
    ANSWER = 5
    STILL_HERE = 6
    REPLICA = 7
    OUT = 8
    CLOCKS = 9
    FINISH = 10
    BYE = 11
    LEASE = 12
    LEASED = 13
    LEFT = 14
    ENDS = 15
    DONE = 16
    WAITS = 17
    HOLDS = 18
    IDLE = 19
    MARKS = 20
    KEPT = 21
    SECURE = 22
    SAFE = 23
    ALIVE = 24
    HERE = 25
    COVERS = 26


LEDGER = (
    FrameKind.LEASE,
    FrameKind.LEFT,
    FrameKind.ENDS,
    FrameKind.DONE,
    FrameKind.WAITS,
    FrameKind.HOLDS,
    FrameKind.COVERS,
)
"""Handled by the worker that keeps the ledger."""
BACKGROUND = (FrameKind.SAFE, FrameKind.REPLICA, FrameKind.CLOCKS, FrameKind.OUT, FrameKind.ALIVE, FrameKind.COVERS)
"""Sent by background threads: they do not show that the sender's program makes progress."""

KNOWN = frozenset(int(kind) for kind in FrameKind)
CHECKED = KNOWN - {FrameKind.ANSWER, FrameKind.LEASED, FrameKind.STILL_HERE, FrameKind.HELLO, FrameKind.KEPT}
"""The others are answers, of which the owner of a shard takes no notice."""
MOST = 1 << 16
"""Entries of a list, at most."""


def check(frame: Frame, size: int) -> None:
    """Refuse a frame that none of `size` workers sends: `MismatchError` says what is wrong with it."""
    kind, numbers, note = frame.kind, frame.numbers, frame.note
    if kind not in KNOWN:
        raise MismatchError(f"no worker sends a frame of kind {kind}")
    if kind not in CHECKED:
        return
    if (frame.body is not None) != (kind in (FrameKind.PUSH, FrameKind.REPLICA)):
        raise MismatchError(f"a frame of kind {kind} {'without' if frame.body is None else 'with'} a body")
    if kind != FrameKind.HOLDS and min(numbers) < 0 and kind not in (FrameKind.PUSH, FrameKind.PULL):
        raise MismatchError(f"a frame of kind {kind} with negative numbers: {numbers}")
    if kind in (FrameKind.SETTINGS, FrameKind.REPLICA) and not isinstance(note, dict):
        raise MismatchError(f"a frame of kind {kind} has a JSON object, got {type(note).__name__}")
    if kind == FrameKind.REPLICA and type(note.get("piece")) is not int:
        raise MismatchError(f"a replica is of a shard, got {note.get('piece')!r:.80}")
    if kind in (FrameKind.MARKS, FrameKind.LEFT, FrameKind.DONE, FrameKind.HOLDS):
        _marks(note or [])
    if kind == FrameKind.COVERS:
        _rows(note)
        _marks(note[1:])
        if not note or not all(0 <= rank < size for rank in note[0]):
            raise MismatchError(f"a frame of kind {kind} begins with lost workers, got {note!r:.80}")
    if kind in (FrameKind.SAFE, FrameKind.CLOCKS):
        _rows(note or [])
    if kind == FrameKind.PUSH and min(numbers[3], numbers[4], numbers[5]) < 0:
        raise MismatchError(f"a push of {numbers[3]} minibatches, number {numbers[4]}, of group {numbers[5]}")
    if kind == FrameKind.LEASE and not (1 <= numbers[4] <= ENDLESS and 1 <= numbers[5] <= ENDLESS):
        raise MismatchError(f"a request for {numbers[5]} units of {numbers[4]} samples")
    if kind == FrameKind.OUT and numbers[0] >= size:
        raise MismatchError(f"worker {numbers[0]} of {size} is said to be lost")


def _marks(note: Any) -> None:
    _rows(note)
    for mark in note:
        if len(mark) != 4 or min(mark) < 0 or not mark[2] <= mark[3] <= ENDLESS:
            raise MismatchError(f"sample ranges are loader, epoch, begin and end, got {mark!r:.80}")


def _rows(note: Any) -> None:
    """A list of lists of whole numbers."""
    if not isinstance(note, list) or len(note) > MOST:
        raise MismatchError(f"a list of at most {MOST} is expected, got {type(note).__name__}")
    for row in note:
        if not isinstance(row, list) or any(type(one) is not int for one in row):
            raise MismatchError(f"lists of whole numbers are expected, got {row!r:.80}")

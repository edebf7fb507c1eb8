# SPDX-License-Identifier: Apache-2.0
"""Kinds of the frames that workers send each other, whose values go over the wire, and which are malformed."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from paceline.communication.sockets.channel import Frame
from paceline.data.ledger.epoch_ledger import ENDLESS
from paceline.errors import MismatchError


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
BACKGROUND = (
    FrameKind.SAFE,
    FrameKind.REPLICA,
    FrameKind.CLOCKS,
    FrameKind.OUT,
    FrameKind.ALIVE,
    FrameKind.COVERS,
)
"""Sent by background threads: they do not show that the sender's program makes progress."""

KNOWN = frozenset(int(kind) for kind in FrameKind)
CHECKED = KNOWN - {FrameKind.ANSWER, FrameKind.LEASED, FrameKind.STILL_HERE, FrameKind.HELLO, FrameKind.KEPT}
"""The others are answers, of which the owner of a shard takes no notice."""
MOST = 1 << 16
"""Entries of a list, at most."""


def check(frame: Frame, size: int) -> None:
    """Refuse a frame that no worker sends.

    Args:
        frame: the frame.
        size: number of workers.

    Raises:
        MismatchError: it is malformed; says what is wrong.
    """
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

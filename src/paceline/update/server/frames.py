# SPDX-License-Identifier: Apache-2.0
"""Kinds of the frames that workers send each other; the values go over the wire."""

from __future__ import annotations

from enum import IntEnum


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

# SPDX-License-Identifier: Apache-2.0
"""What other workers send to the owner of a shard: each frame that none of them sends is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.communication.sockets.frames import Frame
from paceline.errors import MismatchError
from paceline.update.server.protocol import FrameKind, check

SIZE = 4
ROWS = [[0, 0, 0, 4]]
BODY = torch.zeros(3)

GOOD: list[tuple[FrameKind, tuple[int, ...], Any, torch.Tensor | None]] = [
    (FrameKind.SETTINGS, (0,), {"lr": 0.1}, None),
    (FrameKind.MARKS, (7,), ROWS, None),
    (FrameKind.PUSH, (3, 17, 16, 1, 99, 0, 1), None, BODY),
    (FrameKind.PULL, (3, 99, 0), None, None),
    (FrameKind.REPLICA, (3, 1), {"piece": 3}, BODY),
    (FrameKind.SAFE, (), [[0, 5]], None),
    (FrameKind.CLOCKS, (), [[0, 1, 2]], None),
    (FrameKind.OUT, (3, 1), "it was silent", None),
    (FrameKind.LEASE, (1, 0, 0, 40, 1, 16, 0), None, None),
    (FrameKind.DONE, (), None, None),
    (FrameKind.COVERS, (), [[1, 3], *ROWS], None),
]
BAD: list[tuple[int, tuple[int, ...], Any, torch.Tensor | None, str]] = [
    (200, (), None, None, "no worker sends a frame of kind 200"),
    (FrameKind.PUSH, (3,), None, None, "without a body"),
    (FrameKind.SECURE, (), None, BODY, "with a body"),
    (FrameKind.SETTINGS, (-1,), {}, None, "negative numbers"),
    (FrameKind.SETTINGS, (0,), ["lr"], None, "a JSON object, got list"),
    (FrameKind.MARKS, (7,), "all", None, "a list of at most"),
    (FrameKind.MARKS, (7,), [[0, 0, 4, 0]], None, "sample ranges are"),
    (FrameKind.DONE, (), [[0, 0, -4, 0]], None, "sample ranges are"),
    (FrameKind.HOLDS, (), [[0, 0, 4]], None, "sample ranges are"),
    (FrameKind.LEFT, (0, 0), [[0, 0, 0, float("nan")]], None, "lists of whole numbers"),
    (FrameKind.SAFE, (), {"0": 5}, None, "a list of at most"),
    (FrameKind.CLOCKS, (), [[0, True]], None, "lists of whole numbers"),
    (FrameKind.PUSH, (3, 17, 16, -1, 99, 0, 1), None, BODY, "a push of -1 minibatches"),
    (FrameKind.LEASE, (1, 0, 0, 40, 0, 16, 0), None, None, "a request for 16 units of 0 samples"),
    (FrameKind.OUT, (4, 1), "it was silent", None, "worker 4 of 4 is said to be lost"),
    (FrameKind.REPLICA, (3, 1), {"piece": "3"}, BODY, "a replica is of a shard"),
    (FrameKind.COVERS, (), [], None, "begins with lost workers"),
    (FrameKind.COVERS, (), [[4]], None, "begins with lost workers"),
    (FrameKind.COVERS, (), [[1], [0, 0, 4]], None, "sample ranges are"),
]


def frame(kind: int, numbers: tuple[int, ...], note: Any, body: torch.Tensor | None) -> Frame:
    return Frame(kind, (*numbers, *[0] * (8 - len(numbers))), body, note)


@pytest.mark.parametrize("one", GOOD, ids=lambda one: str(one[0]))
def test_what_workers_send_is_taken(one: tuple[int, tuple[int, ...], Any, torch.Tensor | None]) -> None:
    check(frame(*one), SIZE)


@pytest.mark.parametrize("one", BAD, ids=lambda one: one[4])
def test_what_no_worker_sends_is_refused(one: tuple[int, tuple[int, ...], Any, torch.Tensor | None, str]) -> None:
    with pytest.raises(MismatchError, match=one[4]):
        check(frame(*one[:4]), SIZE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(["piece", "lr"]), inner),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 255), st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=8, max_size=8), JSON)
def test_any_frame_is_taken_or_a_mismatch(kind: int, numbers: list[int], note: Any) -> None:
    for body in (None, BODY):
        try:
            check(Frame(kind, tuple(numbers), body, note), SIZE)
        except MismatchError:
            continue

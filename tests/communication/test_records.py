# SPDX-License-Identifier: Apache-2.0
"""Records of TLS that are received in one go: all that has arrived, and no more than there is room for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.communication.sockets.channel import Channel
from paceline.communication.sockets.framing import AGAIN, receive_records
from tests.communication.connections import pair
from tests.communication.test_tls import Authority


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a connection with TLS."""
    with pair(Authority(tmp_path, "job").worker("worker")) as both:
        yield both


def received(channel: Channel, data: memoryview) -> int:
    """How many bytes of `data` have arrived."""
    with contextlib.suppress(*AGAIN):
        return receive_records(channel._sock, data)  # type: ignore[arg-type]
    return 0


def test_records_are_gathered(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    there = memoryview(bytearray(1000))
    assert received(far, there) == 0
    for text in (b"one", b"two", b"three"):
        near._sock.sendall(text)
    arrived = 0
    while arrived < 11:
        arrived += received(far, there[arrived:])
    assert there[:11] == b"onetwothree"


def test_no_more_than_there_is_room_for(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    data = bytes(range(256)) * 200  # four records
    near._sock.sendall(data)
    there, arrived = memoryview(bytearray(len(data))), 0
    while arrived < len(data):
        room = there[arrived : arrived + 20_000]
        more = received(far, room)
        assert more <= room.nbytes
        arrived += more
    assert there == data


def test_the_end_of_a_connection(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    far.close()
    while True:
        with contextlib.suppress(*AGAIN):
            assert receive_records(near._sock, memoryview(bytearray(1))) == 0  # type: ignore[arg-type]
            break

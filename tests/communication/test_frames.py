# SPDX-License-Identifier: Apache-2.0
"""The bytes of a frame, and what is refused in a header."""

from __future__ import annotations

import struct

import pytest
import torch

from paceline.communication.sockets.frames import (
    DTYPES,
    HEADER_BYTES,
    NOTE_LIMIT,
    FrameHeader,
    fitting,
    memory,
    read_note,
)
from paceline.errors import MismatchError

LIMIT = 1000


def test_the_header_byte_for_byte() -> None:
    header = FrameHeader.of(7, [1, -2, 1 << 62], b"{}", torch.zeros(2, 3, dtype=torch.bfloat16))
    expected = b"paceline" + bytes([7, 5, 1, 0, 2, 0, 0, 0, 12, 0, 0, 0, 0, 0, 0, 0])
    expected += struct.pack("<8q", 1, -2, 1 << 62, 0, 0, 0, 0, 0)
    assert header.pack() == expected
    assert len(expected) == HEADER_BYTES == 88
    assert FrameHeader.read(expected, LIMIT) == header
    assert (header.numel, header.dtype) == (6, torch.bfloat16)


def test_no_body_and_an_empty_body_are_two_things() -> None:
    none = FrameHeader.read(FrameHeader.of(0, (), b"", None).pack(), LIMIT)
    empty = FrameHeader.read(FrameHeader.of(0, (), b"", torch.empty(0, dtype=torch.int64)).pack(), LIMIT)
    assert (none.dtype, none.body_bytes, none.numel) == (None, 0, 0)
    assert (empty.dtype, empty.body_bytes, empty.numel) == (torch.int64, 0, 0)


def test_codes_are_not_changed() -> None:
    """Two versions of paceline may meet: a code that was given once keeps its meaning."""
    names = {code: str(dtype).removeprefix("torch.") for code, dtype in DTYPES.items()}
    assert names == {1: "float32", 2: "float64", 3: "int64", 4: "uint8", 5: "bfloat16", 6: "float16"}


@pytest.mark.parametrize(
    ("kind", "numbers", "note", "body", "match"),
    [
        (256, (), b"", None, "0 to 255, got 256"),
        (-1, (), b"", None, "0 to 255, got -1"),
        (0, range(9), b"", None, "at most 8"),
        (0, [1 << 63], b"", None, "64 bits"),
        (0, [-(1 << 63) - 1], b"", None, "64 bits"),
        (0, (), b" " * (NOTE_LIMIT + 1), None, "at most 1048576 bytes, got 1048577"),
        (0, (), b"", torch.zeros(1, dtype=torch.int32), r"cannot carry torch\.int32; it can carry torch\.float32"),
    ],
)
def test_headers_that_are_not_valid(kind: int, numbers: list[int], note: bytes, body: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FrameHeader.of(kind, numbers, note, body)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, b"HTTP/1.1", "not paceline's frames.*HTTP/1.1"),
        (9, b"\x07", "dtype code 7"),
        (9, b"\x00", "dtype code 0"),  # bytes of nothing
        (10, b"\x02\x00", "version 2"),
        (12, struct.pack("<I", NOTE_LIMIT + 1), "a note of 1048577 bytes"),
        (16, struct.pack("<Q", LIMIT + 4), "a body of 1004 bytes is announced, the limit of this channel is 1000"),
        (16, struct.pack("<Q", 1 << 63), "a body of 9223372036854775808 bytes"),
        (16, struct.pack("<Q", 5), "no whole number of elements"),
    ],
)
def test_what_is_refused_in_a_header(at: int, value: bytes, match: str) -> None:
    data = bytearray(FrameHeader.of(1, (), b"", torch.zeros(2)).pack())
    data[at : at + len(value)] = value
    with pytest.raises(MismatchError, match=match):
        FrameHeader.read(data, LIMIT)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"{'a': 1}", b"[" * 200_000, b"1" * 5000, b"cos\nsystem\n(S'true'\ntR."])
def test_notes_that_are_no_json(data: bytes) -> None:
    with pytest.raises(MismatchError, match=f"{len(data)} bytes is not JSON"):
        read_note(data)


@pytest.mark.parametrize("x", [torch.zeros(2, 3).t(), torch.zeros(4)[::2], torch.zeros(2, device="meta")])
def test_memory_that_is_not_in_one_piece_here(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"contiguous tensor of the host, got shape \(\d.* call \.cpu"):
        memory(x)


@pytest.mark.parametrize("buffer", [torch.zeros(5), torch.zeros(7), torch.zeros(6, dtype=torch.int64), torch.zeros(0)])
def test_a_buffer_that_does_not_fit(buffer: torch.Tensor) -> None:
    header = FrameHeader.of(0, (), b"", torch.zeros(6))
    assert fitting(torch.zeros(3, 2), header).nbytes == 24
    with pytest.raises(
        MismatchError, match=rf"6 elements of torch\.float32 does not fit the buffer of {buffer.numel()}"
    ):
        fitting(buffer, header)

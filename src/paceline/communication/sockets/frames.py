# SPDX-License-Identifier: Apache-2.0
"""The format of frames: a header, a JSON note and the raw bytes of one tensor.

::

    header, 88 bytes, little endian                          note             body
    ┌────────┬──────┬───────┬─────────┬──────┬──────┬─────────┬────────────────┬──────────────────────┐
    │ magic  │ kind │ dtype │ version │ note │ body │ numbers │ JSON, UTF-8    │ elements, row-major, │
    │ 8 char │ u8   │ u8    │ u16     │ u32  │ u64  │ 8 x i64 │ `note` bytes   │ `body` bytes         │
    └────────┴──────┴───────┴─────────┴──────┴──────┴─────────┴────────────────┴──────────────────────┘

No received data is ever executed: a header is eight numbers and some sizes, a note is JSON, a body is copied into
memory. Elements are sent as they are in memory, so both ends must be little endian.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import MismatchError, PeerLostError

MAGIC = b"paceline"
VERSION = 1
NUMBERS = 8
NOTE_LIMIT = 1 << 20
"""Most bytes of a note."""

_LAYOUT = struct.Struct(f"<8sBBHIQ{NUMBERS}q")
HEADER_BYTES = _LAYOUT.size  # 88

DTYPES: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int64,
    4: torch.uint8,
    5: torch.bfloat16,
    6: torch.float16,
}
"""Code on the wire -> dtype; 0 is a frame without a body."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ZEROS = (0,) * NUMBERS

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("paceline's channels send elements as they lie in memory and need a little endian machine")


class Closed(PeerLostError):
    """The connection is closed or reset."""


class Late(PeerLostError):
    """The deadline has passed; the channel's `closed` says whether it can still be used."""


class FrameHeader(NamedTuple):
    """The header of a frame.

    Attributes:
        kind: 0..255; the caller gives it a meaning.
        numbers: exactly 8 whole numbers of 64 bits.
        note_bytes: length of the JSON note.
        body_bytes: length of the tensor's bytes.
        dtype: of the body; None without a body (an empty body has a dtype).
    """

    kind: int
    numbers: tuple[int, ...]
    note_bytes: int
    body_bytes: int
    dtype: torch.dtype | None

    @property
    def numel(self) -> int:
        """Elements of the body."""
        return self.body_bytes // self.dtype.itemsize if self.dtype is not None else 0

    def pack(self) -> bytes:
        """The 88 bytes."""
        code = 0 if self.dtype is None else _CODES[self.dtype]
        return _LAYOUT.pack(MAGIC, self.kind, code, VERSION, self.note_bytes, self.body_bytes, *self.numbers)

    @classmethod
    def of(cls, kind: int, numbers: Sequence[int], note: bytes, body: Tensor | None) -> FrameHeader:
        """The header of a frame to be sent; ValueError if it is not valid."""
        if not 0 <= kind <= 255:
            raise ValueError(f"the kind of a frame is a number of 0 to 255, got {kind}")
        padded = (*numbers, *_ZEROS[len(numbers) :])
        if len(padded) > NUMBERS or min(padded) < -(1 << 63) or max(padded) >= 1 << 63:
            raise ValueError(f"a header holds at most {NUMBERS} whole numbers of 64 bits, got {tuple(numbers)}")
        if len(note) > NOTE_LIMIT:
            raise ValueError(f"a note has at most {NOTE_LIMIT} bytes, got {len(note)}; send a tensor instead")
        if body is None:
            return cls(kind, padded, len(note), 0, None)
        dtype = body.dtype
        if dtype not in _CODES:
            known = ", ".join(str(dtype) for dtype in _CODES)
            raise ValueError(f"a frame cannot carry {dtype}; it can carry {known}")
        return cls(kind, padded, len(note), body.numel() * dtype.itemsize, dtype)

    @classmethod
    def read(cls, data: bytes | bytearray | memoryview, limit: int) -> FrameHeader:
        """The inverse of `pack`; MismatchError if it is malformed, or announces a body of more than `limit` bytes."""
        magic, kind, code, version, note_bytes, body_bytes, *numbers = _LAYOUT.unpack(data)
        if magic != MAGIC:
            raise MismatchError(
                f"these are not paceline's frames: expected them to begin with {MAGIC!r}, got {magic!r}"
            )
        if version != VERSION:
            raise MismatchError(f"frames of version {version}, here they have version {VERSION}: install one paceline")
        if note_bytes > NOTE_LIMIT:
            raise MismatchError(f"a note of {note_bytes} bytes is announced, the limit is {NOTE_LIMIT}")
        if body_bytes > limit:
            raise MismatchError(f"a body of {body_bytes} bytes is announced, the limit of this channel is {limit}")
        if code not in DTYPES and (code or body_bytes):
            raise MismatchError(
                f"a body of {body_bytes} bytes with the dtype code {code}, known are 1 to {len(DTYPES)}"
            )
        dtype = DTYPES.get(code)
        if dtype is not None and body_bytes % dtype.itemsize:
            raise MismatchError(f"a body of {body_bytes} bytes is no whole number of elements of {dtype}")
        return cls(kind, tuple(numbers), note_bytes, body_bytes, dtype)


class Frame(NamedTuple):
    """A received frame.

    Attributes:
        kind: of the header.
        numbers: exactly 8, padded with zeros.
        body: the given buffer, or a new one-dimensional tensor; None without a body.
        note: the decoded JSON; None without a note.
    """

    kind: int
    numbers: tuple[int, ...]
    body: Tensor | None
    note: Any


Outgoing = tuple[int, Sequence[int], "Tensor | None", Any]
"""A frame to be sent: its kind, its numbers, its body and its note."""


def write_note(note: Any) -> bytes:
    """`note` as JSON, b"" for None; TypeError if it is not serializable. Bytes are JSON already: for many receivers."""
    if isinstance(note, bytes):
        return note
    return b"" if note is None else json.dumps(note, separators=(",", ":")).encode()


def parts_of(frame: Outgoing, joined: int) -> list[memoryview]:
    """The bytes of a frame: its header with the note, and its body; in one where the body has up to `joined` bytes."""
    kind, numbers, body, note = frame
    text = write_note(note)
    header = FrameHeader.of(kind, numbers, text, body)
    head = header.pack() + text
    if body is None or not header.body_bytes:
        return [memoryview(head)]
    own = memory(body)
    return [memoryview(head), own] if header.body_bytes > joined else [memoryview(head + own)]


def advance(parts: list[memoryview], first: int, size: int) -> int:
    """How many parts from `first` on are done by the next `size` bytes; cuts the one in which they end."""
    done = first
    while done < len(parts) and size >= parts[done].nbytes:
        size -= parts[done].nbytes
        done += 1
    if size:
        parts[done] = parts[done][size:]
    return done - first


def read_note(data: bytes | bytearray) -> Any:
    """The inverse of `write_note`; MismatchError if it is not JSON."""
    if not data:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MismatchError(f"a note of {len(data)} bytes is not JSON: {error}") from error


def memory(x: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, without a copy; ValueError for any other tensor."""
    if x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(
            f"a frame's body must be a contiguous tensor of the host, got shape {tuple(x.shape)} with strides "
            f"{x.stride()} on {x.device}: call .cpu().contiguous() first"
        )
    if x.dtype == torch.bfloat16 or not x.numel():  # which numpy does not have, and memoryview does not cast
        return x.detach().reshape(-1).view(torch.uint8).numpy().data
    return (x.detach() if x.requires_grad else x).numpy().data.cast("B")


def fitting(buffer: Tensor, header: FrameHeader) -> memoryview:
    """The bytes of `buffer`; MismatchError unless it has the announced dtype and number of elements."""
    if buffer.dtype != header.dtype or buffer.numel() != header.numel:
        raise MismatchError(
            f"a body of {header.numel} elements of {header.dtype} does not fit the buffer of {buffer.numel()} "
            f"elements of {buffer.dtype}"
        )
    return memory(buffer)

# SPDX-License-Identifier: Apache-2.0
"""Walks over the fields of a protobuf message in place, without its schema.

A field is a key (varint: number << 3 | wire type) and its value: 0 a varint, 1 eight bytes, 2 a length (varint) and so
many bytes, 5 four bytes. Source: https://protobuf.dev/programming-guides/encoding. protobuf's own library would need
the schema compiled in, and writes fields back in an order of its own; here every byte stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from paceline.errors import DataError

VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


class Field(NamedTuple):
    """A field of a message: its number, its wire type, and its value's first byte and the byte after its last."""

    number: int
    wire: int
    start: int
    stop: int


def fields(data: bytes, start: int, stop: int) -> Iterator[Field]:
    """The fields of the message in these bytes; raises `DataError` where there is none."""
    position = start
    while position < stop:
        key, begin = varint(data, position, stop)
        wire, end = key & 7, begin
        if wire == VARINT:
            _, end = varint(data, begin, stop)
        elif wire == BYTES:
            length, begin = varint(data, begin, stop)
            end = begin + length
        elif wire in (FIXED_64, FIXED_32):
            end = begin + (8 if wire == FIXED_64 else 4)
        else:
            raise DataError(f"byte {position:,} begins no field of protobuf (wire type {wire})")
        if end > stop or key >> 3 == 0:
            raise DataError(f"field {key >> 3} at byte {position:,} would end at byte {end:,} of {stop:,}")
        yield Field(key >> 3, wire, begin, end)
        position = end


def varint(data: bytes, position: int, stop: int) -> tuple[int, int]:
    """A varint, and the byte after it."""
    value = 0
    for place in range(_LONGEST_VARINT):
        if position + place >= stop:
            break
        byte = data[position + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, position + place + 1
    raise DataError(f"a varint at byte {position:,} does not end before byte {stop:,}")

# SPDX-License-Identifier: Apache-2.0
"""The blobs of Caffe's .caffemodel: a NetParameter of protobuf. Everything but their numbers stays as it is.

Source: src/caffe/proto/caffe.proto of https://github.com/BVLC/caffe; (field numbers)::

    NetParameter      layer (100): LayerParameter        layers (2): V1LayerParameter, of older files
    LayerParameter    name (1)  blobs (7): BlobProto     V1LayerParameter  name (4)  blobs (6): BlobProto
    BlobProto         data (5): packed float  double_data (8): packed double  shape (7): BlobShape
                      num, channels, height, width (1 to 4) of older files;  diff (6) and double_diff (9) stay
    BlobShape         dim (1): packed int64
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from paceline.errors import DataError
from paceline_plugins.files.formats import spans
from paceline_plugins.files.formats.model_file import Format, ModelFile
from paceline_plugins.files.formats.spans import Span

LAYERS = {100: (1, 7), 2: (4, 6)}
"""Field of a layer -> its fields of the name and of blobs."""
NUMBERS = {5: spans.DTYPES["f32"], 8: spans.DTYPES["f64"]}
SHAPE, OLD_SHAPE, DIM = 7, (1, 2, 3, 4), 1


class Caffe(Format):
    """A .caffemodel."""

    name = "caffemodel"

    def read(self, data: bytes, keep: Collection[str] = ()) -> ModelFile:
        """See :class:`Format`."""
        try:
            found = list(_blobs(data))
        except DataError as error:
            raise DataError(f"it is no caffemodel, or truncated: {error}") from error
        names = spans.unique([span.name for span in found])
        pairs = zip(names, found, strict=True)
        return spans.cut(data, [Span(name, one.dtype, one.shape, one.start) for name, one in pairs], keep)

    def write(self, model: ModelFile) -> bytes:
        """See :class:`Format`."""
        return spans.joined(model)


def _blobs(data: bytes) -> Iterator[Span]:
    for layer in fields(data, 0, len(data)):
        if layer.number not in LAYERS or layer.wire != BYTES:
            continue
        of_name, of_blob = LAYERS[layer.number]
        inside = list(fields(data, layer.start, layer.stop))
        names = [data[one.start : one.stop].decode(errors="replace") for one in inside if one.number == of_name]
        for number, blob in enumerate(one for one in inside if one.number == of_blob and one.wire == BYTES):
            yield from _numbers(data, blob, f"{names[0] if names else layer.start}[{number}]")


def _numbers(data: bytes, blob: Field, name: str) -> Iterator[Span]:
    inside = list(fields(data, blob.start, blob.stop))
    shape = _shape(data, inside)
    for one in inside:
        if one.number not in NUMBERS:
            continue
        dtype = NUMBERS[one.number]
        if one.wire != BYTES or (one.stop - one.start) % dtype.itemsize:
            raise DataError(f"the blob {name} is not packed")
        count = (one.stop - one.start) // dtype.itemsize
        yield Span(name, dtype, shape if math.prod(shape) == count else (count,), one.start)


def _shape(data: bytes, inside: list[Field]) -> tuple[int, ...]:
    sizes: list[int] = []
    for one in inside:
        if one.number == SHAPE and one.wire == BYTES:
            for dim in fields(data, one.start, one.stop):
                position = dim.start
                while dim.number == DIM and position < dim.stop:
                    size, position = varint(data, position, dim.stop)
                    sizes.append(size)
        elif one.number in OLD_SHAPE and one.wire == VARINT:
            sizes.append(varint(data, one.start, one.stop)[0])
    return tuple(sizes)


# The fields of a protobuf message in place, without its schema: a key (varint: number << 3 | wire type) and its value:
# 0 a varint, 1 eight bytes, 2 a length (varint) and so many bytes, 5 four bytes
# (https://protobuf.dev/programming-guides/encoding). protobuf's own library would write fields back in another order.

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

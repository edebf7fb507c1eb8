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

from paceline.errors import DataError
from paceline_plugins.files.formats import spans
from paceline_plugins.files.formats.model_file import Format, ModelFile
from paceline_plugins.files.formats.protobuf import BYTES, VARINT, Field, fields, varint
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

# SPDX-License-Identifier: Apache-2.0
"""safetensors: the length of a header (uint64, little endian), the header (JSON), and the tensors.

The header says `{name: {"dtype": .., "shape": [..], "data_offsets": [from, to]}, ..}`, with offsets after the header.
Source: https://huggingface.co/docs/safetensors. Its library keeps neither the order of a header nor its spaces, so the
header is read here; nothing of it but offsets, shapes and dtypes is used.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection
from typing import Any

from paceline.errors import DataError
from paceline_plugins.files.formats import spans
from paceline_plugins.files.formats.model_file import Format, ModelFile
from paceline_plugins.files.formats.spans import Span

LARGEST_HEADER = 100 << 20
METADATA = "__metadata__"


class Safetensors(Format):
    """A .safetensors file."""

    name = "safetensors"

    def read(self, data: bytes, keep: Collection[str] = ()) -> ModelFile:
        """See :class:`Format`."""
        begin, header = _header(data)
        found: list[Span] = []
        end = begin
        try:
            for name, about in header.items():
                if name == METADATA:
                    continue
                start, stop = (begin + int(offset) for offset in about["data_offsets"])
                end = max(end, stop)
                dtype = spans.DTYPES.get(str(about["dtype"]).lower())
                if dtype is not None:
                    span = Span(name, dtype, tuple(int(size) for size in about["shape"]), start)
                    if (span.stop, start >= begin, min(span.shape, default=0) >= 0) != (stop, True, True):
                        raise DataError(f"the tensor {name!r} of {span.count} numbers has the offsets {start}, {stop}")
                    found.append(span)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"its header is not of safetensors ({type(error).__name__}: {error})") from error
        if end != len(data):
            raise DataError(f"its tensors end at byte {end:,}, and it has {len(data):,}: is it truncated?")
        found.sort(key=lambda span: (span.start, span.stop))
        if any(one.stop > other.start for one, other in itertools.pairwise(found)):
            raise DataError("two of its tensors overlap")
        return spans.cut(data, found, keep)

    def write(self, model: ModelFile) -> bytes:
        """See :class:`Format`."""
        return spans.joined(model)


def looks_like(data: bytes) -> bool:
    """Whether the file begins with a header of safetensors."""
    return len(data) > 8 and data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= LARGEST_HEADER


def _header(data: bytes) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and the header."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 + length:
        raise DataError(f"its header has {length:,} bytes, and it has {len(data):,} in all: is it truncated?")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise DataError(f"its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise DataError("its header is no JSON object")
    return 8 + length, header

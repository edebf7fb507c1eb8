# SPDX-License-Identifier: Apache-2.0
"""Raw numbers, little endian, with a layout that the user gives.

A layout is a list of entries, separated by commas, in the order of the file:

    NAME:TYPE:SHAPE   a tensor; TYPE is f16, bf16, f32 or f64, SHAPE such as 784x100, or * for all that is left
    skip:BYTES        other bytes, which stay as they are

`f32` alone is `values:f32:*`. Bytes after the last entry stay as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from paceline.errors import DataError
from paceline_plugins.files.formats import spans
from paceline_plugins.files.formats.model_file import Format, ModelFile

EXAMPLE = "'skip:16, w:f32:784x100, b:f32:100'"
_ENTRY = re.compile(r"([^:,]+):(\w+):(\*|\d+(?:x\d+)*)")
_SKIP = re.compile(r"skip:(\d+)")


@dataclass(frozen=True)
class Entry:
    """An entry of a layout: a tensor, or bytes that are skipped."""

    name: str  # empty for skipped bytes
    type: str  # of `spans.DTYPES`
    shape: tuple[int, ...] | None  # None for all that is left; of skipped bytes their number


def parse(layout: str) -> list[Entry]:
    """The entries of a layout; raises `DataError` for text that is none."""
    text = f"values:{layout.strip()}:*" if layout.strip() in spans.DTYPES else layout
    entries = [_entry(part.strip(), layout) for part in text.split(",")]
    names = [one.name for one in entries if one.name]
    if len(set(names)) < len(names):
        raise DataError(f"the layout {layout!r} names a tensor twice; give each its own name")
    if not names:
        raise DataError(f"the layout {layout!r} names no tensor; write it as {EXAMPLE}")
    if any(one.shape is None for one in entries[:-1]):
        raise DataError(f"the layout {layout!r} has * before its end; only the last tensor can take all that is left")
    return entries


def _entry(part: str, layout: str) -> Entry:
    if skipped := _SKIP.fullmatch(part):
        return Entry("", "", (int(skipped[1]),))
    found = _ENTRY.fullmatch(part)
    if found is None or found[2] not in spans.DTYPES:
        raise DataError(f"the layout {layout!r} has the entry {part!r}; write it as {EXAMPLE}, or f32 alone")
    shape = None if found[3] == "*" else tuple(int(size) for size in found[3].split("x"))
    return Entry(found[1].strip(), found[2], shape)


class Flat(Format):
    """Raw numbers.

    Args:
        layout: where they lie.
    """

    name = "flat"

    def __init__(self, layout: str) -> None:
        self._entries = parse(layout)

    def read(self, data: bytes, keep: Collection[str] = ()) -> ModelFile:
        """See :class:`Format`."""
        position, found = 0, list[spans.Span]()
        for entry in self._entries:
            if not entry.name:
                position += math.prod(entry.shape or ())
                continue
            dtype = spans.DTYPES[entry.type]
            shape = entry.shape
            if shape is None:
                shape = ((len(data) - position) // dtype.itemsize,)
                if (len(data) - position) % dtype.itemsize:
                    raise DataError(f"{len(data):,} bytes are no whole number of {entry.type} after byte {position:,}")
            found.append(spans.Span(entry.name, dtype, shape, position))
            position = found[-1].stop
        if position > len(data):
            raise DataError(f"the layout needs {position:,} bytes, and it has {len(data):,}: is it truncated?")
        return spans.cut(data, found, keep)

    def write(self, model: ModelFile) -> bytes:
        """See :class:`Format`."""
        return spans.joined(model)

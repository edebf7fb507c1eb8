# SPDX-License-Identifier: Apache-2.0
"""Kaldi's matrices and vectors in text: numbers within square brackets, a row a line.

Lists of whole numbers look the same in text, so they are read, too. A number that merging leaves as it was keeps its
text: whatever the tools write alike stays as it is, to the last digit. Others are written with nine digits, which give
float32 back exactly.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from paceline.errors import DataError
from paceline_plugins.files.formats import spans
from paceline_plugins.files.formats.kaldi import check_closed, name_after
from paceline_plugins.files.formats.model_file import Format, ModelFile

_BRACKETS = re.compile(rb"\[([^\[\]]*)\]")
_NUMBER = re.compile(rb"\S+")


class KaldiText(Format):
    """A text file of Kaldi; the skeleton is the whole text."""

    name = "kaldi-text"

    def read(self, data: bytes, keep: Collection[str] = ()) -> ModelFile:
        """See :class:`Format`."""
        if data.count(b"[") != data.count(b"]"):
            raise DataError("a matrix begins with [ and has no ] at its end: is it truncated?")
        check_closed(data)
        return ModelFile({n: tensor for n, (_, tensor) in _matrices(data).items() if n not in keep}, data)

    def write(self, model: ModelFile) -> bytes:
        """See :class:`Format`."""
        pieces, position = list[bytes](), 0
        for name, (match, before) in _matrices(model.skeleton).items():
            if name in model.tensors:
                pieces += [model.skeleton[position : match.start(1)], _written(match[1], before, model.tensors[name])]
                position = match.end(1)
        return b"".join([*pieces, model.skeleton[position:]])


def looks_like(data: bytes) -> bool:
    """Whether the file is text with numbers in square brackets."""
    return b"\0" not in data[:65536] and any(_numbers(match[1]) is not None for match in _BRACKETS.finditer(data))


def _matrices(data: bytes) -> dict[str, tuple[re.Match[bytes], Tensor]]:
    found, names, position = list[tuple[re.Match[bytes], Tensor]](), list[str](), 0
    for match in _BRACKETS.finditer(data):
        tensor = _numbers(match[1])
        if tensor is not None:
            names.append(name_after(data[position : match.start()], len(found) + 1))
            found.append((match, tensor))
            position = match.end()
    return dict(zip(spans.unique(names), found, strict=True))


def _numbers(text: bytes) -> Tensor | None:
    """float32 [rows, columns], or [length] of a single row; None if there are other words, or no numbers."""
    rows = [row.split() for row in text.splitlines() if row.strip()]
    words = [word for row in rows for word in row]
    try:
        values = np.array(words, dtype=np.float64).astype(np.float32)
    except ValueError:
        return None
    if not words:
        return None
    tensor = torch.from_numpy(values)
    alike = len(rows) > 1 and len({len(row) for row in rows}) == 1
    return tensor.reshape(len(rows), -1) if alike else tensor


def _written(text: bytes, before: Tensor, now: Tensor) -> bytes:
    """The text with the numbers of `now` where they differ from `before`."""
    changed = torch.nonzero(before.reshape(-1) != now.reshape(-1)).reshape(-1).tolist()
    if not changed:
        return text
    values = now.reshape(-1)[changed].tolist()
    places = [match.span() for match in _NUMBER.finditer(text)]
    pieces, position = list[bytes](), 0
    for place, value in zip(changed, values, strict=True):
        start, stop = places[place]
        pieces += [text[position:start], b"%.9g" % value]
        position = stop
    return b"".join([*pieces, text[position:]])

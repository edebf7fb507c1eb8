# SPDX-License-Identifier: Apache-2.0
"""Numbers that lie in a file as they lie in memory: spans of bytes, with other bytes between them."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline_plugins.files.formats.model_file import ModelFile

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
"""Little endian."""


@dataclass(frozen=True)
class Span:
    """A tensor in a file."""

    name: str  # of the tensor
    dtype: torch.dtype  # of its numbers
    shape: tuple[int, ...]  # of the tensor
    start: int  # its first byte

    @property
    def count(self) -> int:
        """Its numbers."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """The byte after its last."""
        return self.start + self.count * self.dtype.itemsize


def cut(data: bytes, spans: Sequence[Span], keep: Collection[str] = ()) -> ModelFile:
    """Separate the tensors of a file from the bytes between them.

    Args:
        data: the file.
        spans: in the order of the file; they do not overlap, and lie within it.
        keep: names of tensors that stay in the skeleton.
    """
    view, position = memoryview(data), 0
    gaps, tensors = list[bytes](), dict[str, Tensor]()
    for span in spans:
        if span.name in keep:
            continue
        gaps.append(bytes(view[position : span.start]))
        tensors[span.name] = _tensor(view[span.start : span.stop], span)
        position = span.stop
    gaps.append(bytes(view[position:]))
    lengths = struct.pack(f"<{1 + len(gaps)}Q", len(gaps), *map(len, gaps))
    return ModelFile(tensors, b"".join([lengths, *gaps]))


def joined(model: ModelFile) -> bytes:
    """The file of what `cut` returned."""
    (count,) = struct.unpack_from("<Q", model.skeleton)
    lengths = struct.unpack_from(f"<{count}Q", model.skeleton, 8)
    view, position = memoryview(model.skeleton), 8 + 8 * count
    pieces: list[bytes | memoryview] = []
    for length, tensor in zip(lengths, [*model.tensors.values(), None], strict=True):
        pieces.append(view[position : position + length])
        position += length
        if tensor is not None:
            pieces.append(raw(tensor))
    return b"".join(pieces)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def _tensor(view: memoryview, span: Span) -> Tensor:
    if not span.count:
        return torch.empty(span.shape, dtype=span.dtype)
    return torch.frombuffer(bytearray(view), dtype=span.dtype).reshape(span.shape)


def unique(names: Sequence[str]) -> list[str]:
    """The names, numbered where one occurs again."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return found

# SPDX-License-Identifier: Apache-2.0
"""NumPy's .npy and .npz. Pickled objects in them are never loaded; arrays that hold no floating-point numbers stay."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import DataError
from paceline_plugins.files.formats import spans
from paceline_plugins.files.formats.model_file import Format, ModelFile
from paceline_plugins.files.formats.spans import Span

NPY, ZIP = b"\x93NUMPY", b"PK"
_TORCH: dict[Any, torch.dtype] = {
    np.dtype("<f2"): torch.float16,
    np.dtype("<f4"): torch.float32,
    np.dtype("<f8"): torch.float64,
}


class Npy(Format):
    """One array."""

    name = "npy"

    def read(self, data: bytes, keep: Collection[str] = ()) -> ModelFile:
        """See :class:`Format`."""
        span, dtype = array_span(data, "array")
        if span is None:
            raise DataError(f"the array holds {dtype}; only little-endian float16, float32 and float64 can be merged")
        if span.stop != len(data):
            raise DataError(f"the array ends at byte {span.stop:,}, and it has {len(data):,}: is it truncated?")
        return spans.cut(data, [span], keep)

    def write(self, model: ModelFile) -> bytes:
        """See :class:`Format`."""
        return spans.joined(model)


class Npz(Format):
    """Several arrays in a zip file; the skeleton is the whole file. The bytes are those that NumPy would write."""

    name = "npz"

    def read(self, data: bytes, keep: Collection[str] = ()) -> ModelFile:
        """See :class:`Format`."""
        tensors: dict[str, Tensor] = {}
        for info, body in _members(data):
            span, _ = array_span(body, info.filename) if body.startswith(NPY) else (None, None)
            if span is not None and span.name not in keep:
                if span.stop > len(body):
                    raise DataError(f"the array {info.filename!r} is truncated")
                tensors |= spans.cut(body, [span]).tensors
        return ModelFile(tensors, data)

    def write(self, model: ModelFile) -> bytes:
        """See :class:`Format`."""
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            for info, body in _members(model.skeleton):
                span = array_span(body, info.filename)[0] if info.filename in model.tensors else None
                if span is not None:
                    body = body[: span.start] + spans.raw(model.tensors[info.filename]) + body[span.stop :]
                with archive.open(_fresh(info), "w", force_zip64=True) as file:  # as NumPy writes it
                    file.write(body)
        return made.getvalue()


def _fresh(info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """The same member, to be written."""
    fresh = zipfile.ZipInfo(info.filename, info.date_time)
    fresh.compress_type, fresh.external_attr = info.compress_type, info.external_attr
    return fresh


def array_span(data: bytes, name: str) -> tuple[Span | None, Any]:
    """The numbers of a .npy file; None if they are not floating-point. Also NumPy's dtype."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except (ValueError, OSError) as error:
        raise DataError(f"the array {name!r} has no header of NumPy ({error})") from error
    known = _TORCH.get(dtype)
    return (None if known is None else Span(name, known, tuple(shape), file.tell())), dtype


def _members(data: bytes) -> list[tuple[zipfile.ZipInfo, bytes]]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [(info, archive.read(info)) for info in archive.infolist()]
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, OSError) as error:
        raise DataError(f"it is no whole zip file ({error}): is it truncated?") from error

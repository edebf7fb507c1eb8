# SPDX-License-Identifier: Apache-2.0
"""Batches that the program made: how many samples one holds, and a part of one.

The first dimension counts the samples. Only a batch in which all tensors, arrays and lists agree on their number is
cut: others (time-major sequences, lists of pictures) stay whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.data.sampling.split import even_parts


def samples_in(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor or array; 0 if it has none."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for part in batch:
            samples = samples_in(part)
            if samples:
                return samples
        return 0
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) > 0 else 0


def piece_of_rest(rest: list[Any], workers: int, rank: int) -> Any:
    """Worker `rank`'s part of the last, incomplete round, each batch of which is cut among some of the workers."""
    for batch, (low, high) in zip(rest, even_parts(workers, len(rest)), strict=True):
        if low <= rank < high:
            samples = rows_in(batch)
            if samples == 0:
                return batch if rank == low else None
            begin, end = even_parts(samples, high - low)[rank - low]
            return _rows(batch, begin, end) if begin < end else None
    return None


def has_piece(samples: Sequence[int], workers: int, rank: int) -> bool:
    """Whether worker `rank` gets a part of a last round of batches with so many samples; 0 for one that stays whole."""
    for count, (low, high) in zip(samples, even_parts(workers, len(samples)) if samples else (), strict=True):
        if low <= rank < high:
            return rank - low < max(1, count)
    return False


def are_whole(loader: Any) -> bool:
    """Whether all batches of an iterable have one size: `drop_last`, or TensorFlow's `drop_remainder`."""
    if getattr(loader, "drop_last", False):
        return True
    try:
        sizes = list(_lengths(getattr(loader, "element_spec", None)))
    except ValueError:  # TensorFlow knows no dimension of a shape
        return False
    return bool(sizes) and None not in sizes


def rows_in(batch: Any) -> int:
    """The samples of a batch that can be cut; 0 if its parts disagree on their number, or have none."""
    lengths = set(_lengths(batch))
    return int(lengths.pop()) if len(lengths) == 1 and samples_in(batch) else 0


def sum_of(batch: Any, start: int = 0) -> int:
    """A checksum of what a batch holds, of up to 1 KiB of each tensor or array; continues `start`."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for part in batch:
            start = sum_of(part, start)
        return start
    if hasattr(batch, "reshape") and hasattr(batch, "dtype"):
        batch = batch.reshape(-1)[: 1024 // max(1, batch.dtype.itemsize)].tolist()
    elif not isinstance(batch, (str, bytes, int, float)):
        return start
    return zlib.crc32(repr(batch).encode(), start)


def _lengths(batch: Any) -> Iterator[Any]:
    """The first dimension of every tensor and array of a batch, and the length of every list of other things."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)) and _is_nested(batch):
        for part in batch:
            yield from _lengths(part)
    elif isinstance(batch, (list, tuple)):
        yield len(batch)
    elif len(getattr(batch, "shape", "")):
        yield batch.shape[0]


def _rows(batch: Any, begin: int, end: int) -> Any:
    """Samples begin .. end (excl.) of a batch; what is alike for all samples stays."""
    if isinstance(batch, dict):
        return {key: _rows(value, begin, end) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_rows(value, begin, end) for value in batch))
    if isinstance(batch, (list, tuple)) and _is_nested(batch):
        return type(batch)(_rows(value, begin, end) for value in batch)
    if isinstance(batch, (list, tuple)) or len(getattr(batch, "shape", "")):
        return batch[begin:end]
    return batch


def _is_nested(batch: Any) -> bool:
    """Whether a list holds parts of a batch, rather than one thing for each sample."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    return isinstance(batch, (list, tuple)) and any(hasattr(part, "shape") or _is_nested(part) for part in batch)

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


def place_in_rest(batches: int, workers: int, rank: int) -> tuple[int, tuple[int, int]]:
    """Which of the batches of a last, incomplete round, each cut among some of the workers, is for worker `rank`; and
    (i, n), since it gets part i of n of it."""
    parts = even_parts(workers, batches)
    number = next(number for number, (_, end) in enumerate(parts) if rank < end)
    begin, end = parts[number]
    return number, (rank - begin, end - begin)


def piece_of_rest(rest: list[Any], workers: int, rank: int) -> Any:
    """Worker `rank`'s part of these batches of a last, incomplete round; None if it has none."""
    number, (part, parts) = place_in_rest(len(rest), workers, rank)
    lengths = set(_lengths(rest[number]))
    if len(lengths) != 1 or not samples_in(rest[number]):  # its parts disagree on how many it has
        return rest[number] if part == 0 else None
    begin, end = even_parts(int(lengths.pop()), parts)[part]
    return _rows(rest[number], begin, end) if begin < end else None


def has_piece(samples: Sequence[int], workers: int, rank: int) -> bool:
    """Whether worker `rank` gets a part of a last round of batches with so many samples; 0 for one that stays whole."""
    number, (part, _) = place_in_rest(len(samples), workers, rank)
    return part < max(1, samples[number])


def are_whole(loader: Any) -> bool:
    """Whether all batches of an iterable have one size: `drop_last`, or TensorFlow's `drop_remainder`."""
    if getattr(loader, "drop_last", False):
        return True
    try:
        sizes = list(_lengths(getattr(loader, "element_spec", None)))
    except ValueError:  # TensorFlow knows no dimension of a shape
        return False
    return bool(sizes) and None not in sizes


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

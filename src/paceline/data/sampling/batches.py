# SPDX-License-Identifier: Apache-2.0
"""The user's batches: how many samples one holds, and a part of one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.data.sampling.split import even_parts


def samples_in(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor or array; 0 if it has none."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for part in batch:
            found = samples_in(part)
            if found:
                return found
        return 0
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) > 0 else 0


def piece_of_rest(rest: list[Any], workers: int, rank: int) -> Any:
    """Worker `rank`'s part of the last, incomplete round, each batch of which is cut among some of the workers."""
    for number, (low, high) in enumerate(even_parts(workers, len(rest))):
        if low <= rank < high:
            batch = rest[number]
            if samples_in(batch) == 0:  # no dimension to cut: it stays whole
                return batch if rank == low else None
            begin, end = even_parts(samples_in(batch), high - low)[rank - low]
            return _rows(batch, begin, end) if begin < end else None
    return None


def _rows(batch: Any, begin: int, end: int) -> Any:
    """Samples begin .. end (excl.) of a batch."""
    if isinstance(batch, dict):
        return {key: _rows(value, begin, end) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_rows(value, begin, end) for value in batch))
    if isinstance(batch, (list, tuple)) and any(hasattr(part, "shape") for part in batch):
        return type(batch)(_rows(value, begin, end) for value in batch)
    if isinstance(batch, Tensor) and batch.dim() == 0:
        return batch
    return batch[begin:end]

# SPDX-License-Identifier: Apache-2.0
"""The samples of an epoch as ranges of numbers, for `run.share`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Range:
    """Samples `begin` up to but not `end`; it looks like an array of them, so that paceline counts and cuts it."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end

    @property
    def shape(self) -> tuple[int]:
        """How many samples."""
        return (self.end - self.begin,)

    def __getitem__(self, rows: slice) -> Range:
        begin, end, _ = rows.indices(self.end - self.begin)
        return Range(self.begin + begin, self.begin + end)


class Ranges(Sequence[Range]):
    """`total` samples in ranges of `batch`; the last one may be shorter.

    Raises:
        ValueError: there is no sample, or none in a range.
    """

    def __init__(self, total: int, batch: int) -> None:
        if total < 1 or batch < 1:
            raise ValueError(f"there must be a sample and a batch of one at least, got total {total} and batch {batch}")
        self.total, self.batch = total, batch

    def __len__(self) -> int:
        return -(-self.total // self.batch)

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < len(self):
            raise IndexError(place)
        return Range(place * self.batch, min(self.total, (place + 1) * self.batch))

# SPDX-License-Identifier: Apache-2.0
"""Sets of whole numbers as ranges: a few ranges describe an epoch of any length."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Range = tuple[int, int]
"""begin .. end (excl.)."""


class Ranges:
    """A set of whole numbers, kept as disjoint ranges in order, no two of which touch; those given may overlap."""

    def __init__(self, ranges: Iterable[Iterable[int]] = ()) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in ranges:
            self.add(begin, end)

    @classmethod
    def joined(cls, ranges: Iterable[Range]) -> Ranges:
        """The union of ranges that do not overlap, in any order."""
        joined = cls()
        for begin, end in sorted(ranges):
            if joined._ends and joined._ends[-1] == begin:
                joined._ends[-1] = end
            else:
                joined._begins.append(begin)
                joined._ends.append(end)
        return joined

    def __iter__(self) -> Iterator[Range]:
        return zip(list(self._begins), list(self._ends), strict=True)

    def __bool__(self) -> bool:
        return bool(self._begins)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"Ranges({list(self)})"

    def __contains__(self, place: int) -> bool:
        k = bisect_right(self._begins, place) - 1
        return k >= 0 and place < self._ends[k]

    def run_end(self, place: int) -> int | None:
        """Where the run of numbers ends that are in it, or not in it, as `place` is; None if it has no end."""
        k = bisect_right(self._begins, place) - 1
        if k >= 0 and place < self._ends[k]:
            return self._ends[k]
        return self._begins[k + 1] if k + 1 < len(self._begins) else None

    @property
    def total(self) -> int:
        return sum(self._ends) - sum(self._begins)

    def add(self, begin: int, end: int) -> int:
        """Add begin .. end (excl.); returns how many of them are new."""
        if begin >= end:
            return 0
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        before = sum(self._ends[first:last]) - sum(self._begins[first:last])
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]
        return end - begin - before

    def remove(self, begin: int, end: int) -> int:
        """Remove begin .. end (excl.); returns how many of them were in it."""
        if begin >= end:
            return 0
        first, last = bisect_right(self._ends, begin), bisect_left(self._begins, end)
        if first >= last:
            return 0
        before = sum(self._ends[first:last]) - sum(self._begins[first:last])
        kept = [(self._begins[first], begin), (end, self._ends[last - 1])]
        kept = [(low, high) for low, high in kept if low < high]
        self._begins[first:last] = [low for low, _ in kept]
        self._ends[first:last] = [high for _, high in kept]
        return before - sum(high - low for low, high in kept)

    def take(self, most: int) -> Range | None:
        """Remove and return up to `most` numbers (at least 1) of the first range."""
        if not self._begins:
            return None
        begin, end = self._begins[0], min(self._ends[0], self._begins[0] + most)
        self.remove(begin, end)
        return begin, end

    def cut(self, begin: int, end: int) -> list[Range]:
        """Its `begin`-th to `end`-th (excl.) numbers, as ranges."""
        parts, passed = [], 0
        for low, high in self:
            first, last = max(begin - passed, 0), min(end - passed, high - low)
            if first < last:
                parts.append((low + first, low + last))
            passed += high - low
            if passed >= end:
                break
        return parts

    def within(self, begin: int, end: int) -> list[Range]:
        """Its intersection with begin .. end (excl.)."""
        first, last = bisect_right(self._ends, begin), bisect_left(self._begins, end)
        near = zip(self._begins[first:last], self._ends[first:last], strict=True)
        both = [(max(low, begin), min(high, end)) for low, high in near]
        return [(low, high) for low, high in both if low < high]

    def without(self, other: Iterable[Range]) -> Ranges:
        """A copy without `other`."""
        rest = self.copy()
        for begin, end in other:
            rest.remove(begin, end)
        return rest

    def copy(self) -> Ranges:
        copied = Ranges()
        copied._begins, copied._ends = list(self._begins), list(self._ends)
        return copied

    def state(self) -> list[list[int]]:
        """[begin, end] pairs, for JSON."""
        return [[begin, end] for begin, end in self]

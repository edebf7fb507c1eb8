# SPDX-License-Identifier: Apache-2.0
"""Samples of some places of an order, computed at once: numpy costs as much for sixteen places as for a thousand."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from paceline.data.ledger.ranges import Range
from paceline.data.sampling.order import Order

LOOKUP_PLACES = 4096
"""So many places are computed at once, at least, where it is known that they will be asked for."""


class LookupCache:
    """What stands at some places.

    Args:
        order: of an epoch.
        ranges: the places; they may overlap or touch.
    """

    def __init__(self, order: Order, ranges: Iterable[Range]) -> None:
        self.order = order
        merged = _merged(ranges)
        self._ids = order.at(merged)
        self._begins = [begin for begin, _ in merged]
        self._ends = [end for _, end in merged]
        self._offsets = [0, *accumulate(end - begin for begin, end in merged)]

    def at(self, ranges: Iterable[Range]) -> list[Any] | None:
        """What stands at these places; None where one of them is not among those that were computed."""
        found: list[Any] = []
        for begin, end in ranges:
            k = bisect_right(self._begins, begin) - 1
            if k < 0 or end > self._ends[k]:
                return None
            first = self._offsets[k] + begin - self._begins[k]
            found += self._ids[first : first + end - begin]
        return found


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """The same places as few ranges, in order."""
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found

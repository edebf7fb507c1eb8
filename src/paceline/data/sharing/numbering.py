# SPDX-License-Identifier: Apache-2.0
"""Numbers the data that a run shares in the order of `run.share`, alike on every worker.

A program may make its batches anew for each epoch, so data that it drops are dropped here too; only their positions
stay. Data are referred to weakly if their type allows; others (lists) are kept until the reference count shows that
the program dropped them. Noticing that late changes no number, since dropped data cannot be shared again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from paceline.data.sampling.position import Position

OURS = 3
"""Reference count of data that only `NumberedData` holds: its own, and two of the function that counts."""


class NumberedData:
    """The shared data.

    Attributes:
        positions: this worker's position in each, by number.
        live: numbers of data that the program may still iterate over, or whose work has not all entered.
    """

    def __init__(self) -> None:
        self.positions: list[Position] = []
        self.live: list[int] = []
        self._numbers: dict[int, int] = {}  # id of data -> number
        self._data: dict[int, Callable[[], Any]] = {}  # number -> returns the data, or None
        self._held: dict[int, Any] = {}  # number -> data without weak references

    def number(self, data: Any) -> int | None:
        """The number of data; None if they are new."""
        number = self._numbers.get(id(data))
        return number if number is not None and self._data[number]() is data else None

    def add(self, data: Any) -> int:
        """Number new data."""
        self._let_go()
        number = len(self.positions)
        try:
            self._data[number] = weakref.ref(data)
        except TypeError:
            self._held[number] = data
            self._data[number] = lambda: self._held.get(number)
        self._numbers[id(data)] = number
        self.positions.append(Position())
        self.live.append(number)
        return number

    def _let_go(self) -> None:
        """Forget data that the program has dropped, and positions that can no longer change."""
        for number in [one for one in self._held if _is_dropped(self._held, one)]:
            del self._held[number]
        gone = {number for number, data in self._data.items() if data() is None}
        if gone:
            self._numbers = {key: number for key, number in self._numbers.items() if number not in gone}
            self._data = {number: data for number, data in self._data.items() if number not in gone}
        self.live = [one for one in self.live if one in self._data or not self.positions[one].settled]
        for number in gone.difference(self.live):
            self.positions[number].strip()


def _is_dropped(held: dict[int, Any], number: int) -> bool:
    data = held[number]
    return sys.getrefcount(data) <= OURS

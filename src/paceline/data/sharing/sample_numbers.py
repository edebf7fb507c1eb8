# SPDX-License-Identifier: Apache-2.0
"""Detects batches that hold the numbers of their samples, by which a program may fill a table of its own.

Each worker trains on its part of an epoch, so such a table (targets, losses or weights of samples) lacks the rest.

The data that a run shares are numbered in the order of `run.share`, alike on every worker. A program may make its
batches again for each epoch, so data that it drops are dropped here too; only positions stay. Data are referred to
weakly if their type allows; others (lists) are kept until the reference count shows that the program dropped them.
Noticing that late changes no number, since dropped data cannot be shared again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Subset

from paceline.data.sampling.position import Position

ENOUGH = 8
"""So many numbers in a row are no coincidence."""
NUMBERS = (
    "the batches hold the numbers of their samples: where the program fills a table by them (targets, losses or "
    "weights of samples), each worker fills in its own part only, and rank 0 saves no more than that; with the two "
    "lines in the program, run.messages.all_reduce adds such tables up"
)


class SampleNumbers:
    """Compares the first batches of a loader with the samples that were asked for.

    Args:
        data: the loader's data set.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._places: set[Any] | None = None  # keys of a batch's entries that have held the numbers so far
        self._equal = 0
        self._open = True

    def are_handed_out(self, batch: Any, asked: Callable[[], Sequence[Any]]) -> bool:
        """Whether this batch shows that one entry of every batch is the numbers of its samples; true once at most.

        Args:
            batch: the next one.
            asked: returns the numbers of its samples.
        """
        if not self._open:
            return False
        entries = _entries(batch)
        names = _names(self._data, asked()) if len(entries) > 1 else []
        keys = {key for key, value in entries.items() if value in names}
        self._places = keys if self._places is None else self._places & keys
        self._equal += len(names[0]) if names else 0
        self._open = bool(self._places) and self._equal < ENOUGH
        return bool(self._places) and self._equal >= ENOUGH


def _entries(batch: Any) -> dict[Any, list[int] | None]:
    """The entries of a batch; whole numbers, one a sample, as a list."""
    rows = batch if isinstance(batch, dict) else dict(enumerate(batch)) if isinstance(batch, (list, tuple)) else {}
    return {key: _whole_numbers(value) for key, value in rows.items()}


def _whole_numbers(value: Any) -> list[int] | None:
    if isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point() and not value.is_complex():
        numbers: list[int] = value.tolist()
        return numbers
    return None


def _names(data: Any, numbers: Sequence[Any]) -> list[list[Any]]:
    """The numbers of some samples, in the data set and in each one of which it is a subset."""
    names = [list(numbers)]
    while isinstance(data, Subset):
        names.append([int(data.indices[number]) for number in names[-1]])
        data = data.dataset
    return names


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

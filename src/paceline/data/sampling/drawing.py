# SPDX-License-Identifier: Apache-2.0
"""Draws from the user's sampler: all at once if it is finite, chunk by chunk if it is huge or endless.

Every worker draws the whole order from the epoch's seed and takes its part, so that no communication is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from paceline.core import rng
from paceline.data.ledger.epoch_ledger import ENDLESS
from paceline.data.ledger.ranges import Range
from paceline.data.sampling.order import Drawn, Order
from paceline.data.sampling.position import set_states

HELD = 1 << 20
"""An order of at most this many samples is held in memory."""
LONGEST = 1 << 26
"""A sampler with a length of at most this many items is held in memory."""
CHUNK = 1 << 10


class Drawing:
    """Iterates over a sampler with random states of its own; those of the program stay as they are.

    Args:
        items: returns the iterable.
        begin: sets all generators to the state at the start.
        generators: the sampler's own.
    """

    def __init__(
        self, items: Callable[[], Iterable[Any]], begin: Callable[[], None], generators: list[torch.Generator]
    ) -> None:
        self._items, self._begin, self._generators = items, begin, generators
        self._iterator: Iterator[Any] | None = None
        self._states: tuple[dict[str, Any], list[torch.Tensor]] | None = None

    def take(self, enough: Callable[[list[Any]], bool]) -> list[Any]:
        """Draw items until `enough` of them, or to the end."""
        items: list[Any] = []
        with self._inside():
            if self._iterator is None:
                self._iterator = iter(self._items())
            while not enough(items) and (chunk := list(islice(self._iterator, CHUNK))):
                items += chunk
        return items

    def again(self) -> Drawing:
        """The same from the start."""
        return Drawing(self._items, self._begin, self._generators)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        outside = self._now()
        try:
            if self._states is None:
                self._begin()
            else:
                self._put(self._states)
            yield
            self._states = self._now()
        finally:
            self._put(outside)

    def _now(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        return rng.capture(), [generator.get_state() for generator in self._generators]

    def _put(self, states: tuple[dict[str, Any], list[torch.Tensor]]) -> None:
        rng.restore(states[0])
        set_states(self._generators, states[1])


class StreamedOrder:
    """The order of a sampler too long to hold: draws on demand, and keeps the latest items.

    Args:
        drawing: of the sampler.
        begun: the items drawn so far.
        length: the sampler's; None if it has none.
    """

    def __init__(self, drawing: Drawing, begun: list[Any], length: int | None) -> None:
        self._drawing, self._held, self._first = drawing, begun, 0
        self._length, self._most = length, len(begun)
        self.end: int | None = None
        """Number of items, once the sampler has ended."""

    def __len__(self) -> int:
        return ENDLESS if self._length is None else self._length

    def reach(self, place: int) -> int:
        """Draw up to `place` (excl.); returns `place`, or the end if the sampler ends before."""
        missing = place - self._first - len(self._held)
        if missing > 0 and self.end is None:
            self._held += self._drawing.take(lambda items: len(items) >= missing)
            if self._first + len(self._held) < place:
                self.end = self._first + len(self._held)
        return place if self.end is None else min(place, self.end)

    def at(self, ranges: Iterable[Range]) -> list[Any]:
        """The items at these places; fewer if some lie after the end."""
        items: list[Any] = []
        for begin, end in ranges:
            if begin < self._first:  # a lost worker's places: draw again from the start
                self._drawing, self._held, self._first = self._drawing.again(), [], 0
            while begin >= self._first + 2 * self._most:
                self.reach(self._first + 2 * self._most)
                if self.end is not None and self.end <= begin:
                    break
                del self._held[: self._most]
                self._first += self._most
            self.reach(end)
            items += self._held[begin - self._first : end - self._first]
        return items


def drawn(drawing: Drawing, length: int | None) -> Order:
    """The order of a sampler: a list, or a :class:`StreamedOrder` if it is too long for one.

    Args:
        drawing: of the sampler.
        length: the sampler's; None if it has none.
    """
    least = length if length is not None and length <= LONGEST else 0
    weight = 0

    def enough(items: list[Any]) -> bool:
        nonlocal weight
        weight += sum(map(_samples, items[-CHUNK:]))
        return weight > HELD and len(items) > least

    begun = drawing.take(enough)
    if not (weight > HELD and len(begun) > least):
        return Drawn(begun)
    return StreamedOrder(drawing, begun, length if length is not None and length > LONGEST else None)


def _samples(item: Any) -> int:
    return len(item) if isinstance(item, (list, tuple)) else 1

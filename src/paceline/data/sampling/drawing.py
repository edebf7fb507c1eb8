# SPDX-License-Identifier: Apache-2.0
"""Draws from the user's sampler: all at once if it is finite, piece by piece if it is huge or endless.

Every worker draws all of it, from a seed of the epoch, and takes its part, so that no communication is needed.
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
"""Samples of an order that are held at once, at least."""
LONGEST = 1 << 26
"""Items of a sampler that are held, at most, where it says beforehand how many there will be."""
CHUNK = 1 << 10


class Drawing:
    """A sampler under way, whose random generators go on where they stood and leave those outside alone.

    Args:
        items: gives what is gone through.
        begin: puts all generators where they are to begin.
        generators: of the sampler's own.
    """

    def __init__(
        self, items: Callable[[], Iterable[Any]], begin: Callable[[], None], generators: list[torch.Generator]
    ) -> None:
        self._items, self._begin, self._generators = items, begin, generators
        self._under_way: Iterator[Any] | None = None
        self._stand: tuple[dict[str, Any], list[torch.Tensor]] | None = None

    def take(self, enough: Callable[[list[Any]], bool]) -> list[Any]:
        """The next items, until these are enough; all that are left, where that never is so."""
        found: list[Any] = []
        with self._inside():
            if self._under_way is None:
                self._under_way = iter(self._items())
            while not enough(found) and (chunk := list(islice(self._under_way, CHUNK))):
                found += chunk
        return found

    def again(self) -> Drawing:
        """From the start."""
        return Drawing(self._items, self._begin, self._generators)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        outside = self._now()
        try:
            if self._stand is None:
                self._begin()
            else:
                self._put(self._stand)
            yield
            self._stand = self._now()
        finally:
            self._put(outside)

    def _now(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        return rng.capture(), [generator.get_state() for generator in self._generators]

    def _put(self, stand: tuple[dict[str, Any], list[torch.Tensor]]) -> None:
        rng.restore(stand[0])
        set_states(self._generators, stand[1])


class StreamedOrder:
    """A sampler that is drawn from as its places are asked for; some of what was drawn last is kept.

    Args:
        drawing: of the sampler.
        begun: what was drawn so far.
        length: what the sampler says; None where it has no end.
    """

    def __init__(self, drawing: Drawing, begun: list[Any], length: int | None) -> None:
        self._drawing, self._held, self._first = drawing, begun, 0
        self._length, self._most = length, len(begun)
        self.end: int | None = None
        """Where it came to an end after all."""

    def __len__(self) -> int:
        return ENDLESS if self._length is None else self._length

    def reach(self, place: int) -> int:
        """Draw as far as this place (excl.), and give how far there is something."""
        missing = place - self._first - len(self._held)
        if missing > 0 and self.end is None:
            self._held += self._drawing.take(lambda found: len(found) >= missing)
            if self._first + len(self._held) < place:
                self.end = self._first + len(self._held)
        return place if self.end is None else min(place, self.end)

    def at(self, ranges: Iterable[Range]) -> list[Any]:
        """What stands at these places; less, where they lie behind the end."""
        found: list[Any] = []
        for begin, end in ranges:
            if begin < self._first:  # a lost worker's, that are done again
                self._drawing, self._held, self._first = self._drawing.again(), [], 0
            while begin >= self._first + 2 * self._most:
                self.reach(self._first + 2 * self._most)
                if self.end is not None and self.end <= begin:
                    break
                del self._held[: self._most]
                self._first += self._most
            self.reach(end)
            found += self._held[begin - self._first : end - self._first]
        return found


def drawn(drawing: Drawing, length: int | None) -> Order:
    """What a sampler gives, as a list where it is not too long for one.

    Args:
        drawing: of it.
        length: what it says itself; None where it does not.
    """
    least = length if length is not None and length <= LONGEST else 0
    weight = 0

    def enough(found: list[Any]) -> bool:
        nonlocal weight
        weight += sum(map(_samples, found[-CHUNK:]))
        return weight > HELD and len(found) > least

    begun = drawing.take(enough)
    if not (weight > HELD and len(begun) > least):
        return Drawn(begun)
    return StreamedOrder(drawing, begun, length if length is not None and length > LONGEST else None)


def _samples(item: Any) -> int:
    return len(item) if isinstance(item, (list, tuple)) else 1

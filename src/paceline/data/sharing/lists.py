# SPDX-License-Identifier: Apache-2.0
"""Shares a list of batches, or of files, each of which counts as one sample.

The list keeps its order. It has a length and random access, so a worker reads only its own items, also after a resume
and where items are leased.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from paceline.core.world import World
from paceline.data.ledger.epoch_ledger import MOST
from paceline.data.sampling.assignment import Portion, Tail
from paceline.data.sampling.batches import piece_of_rest, samples_in
from paceline.data.sampling.position import Cut
from paceline.errors import UnsupportedError


class ListPlan:
    """The plan of a list of batches or paths; its items are the places."""

    unit, most = 1, MOST

    def __init__(self, items: Sequence[Any]) -> None:
        if isinstance(items, (str, bytes)):
            raise UnsupportedError(f"{items!r} is one name and no list; share a list of files, or a loader")
        self._items = items

    @property
    def tail(self) -> Tail:
        """What becomes of a last round that is not full: batches are cut, names of files are not."""
        batches = len(self._items) > 0 and not isinstance(self._items[0], (str, bytes, os.PathLike))
        return "pieces" if batches else "even"

    def places(self, epoch: int) -> int:
        return len(self._items)

    def cut(self, places: int, workers: int) -> Cut:
        return "rounds", places, 1, workers

    def stripe_of(self, world: World, epoch: int) -> int:
        return world.rank

    def streamed(self, epoch: int) -> None:
        """A list can be looked at everywhere."""

    def has_piece(self, portion: Portion) -> bool:
        """Whether a worker gets a part of batches that are cut among several."""
        return self.at(portion) is not None

    def at(self, portion: Portion) -> Any:
        """The item of a place, or this worker's part of several; None if it has none."""
        items = [self._items[place] for begin, end in portion.places for place in range(begin, end)]
        if portion.part is None:
            return items[0]
        rank, workers = portion.part
        return piece_of_rest(items, workers, rank)

    def samples(self, item: Any) -> int:
        """Samples in an item; 0 if unknown."""
        return 1 if isinstance(item, (str, bytes, os.PathLike)) else samples_in(item)

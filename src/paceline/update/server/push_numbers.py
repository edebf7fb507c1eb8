# SPDX-License-Identifier: Apache-2.0
"""Which pushes are in a shard: by number, and by the samples that they are made of.

Every worker numbers its pushes; its clock is that number. A push whose number the shard has already is the same push
again: its owner was lost before it answered, or before its sender knew that a replica holds it. So a sender may send a
push as often as it likes.

A worker that dies may have reached some shards with its last push and others not. Its samples go to another worker, who
pushes them to all shards; those that have them already pass them over. So each shard remembers which places of the data
are in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.data.ledger.ranges import Ranges

EPOCHS = 8
"""Epochs of a loader whose places are remembered: nobody begins one before the one before it is in every shard."""


class PushNumbers:
    """The pushes that one shard has seen.

    Attributes:
        applied: sender -> number of its last push.
        repeated: places that came again together with others that were new, so that they had to be taken twice.
    """

    def __init__(self) -> None:
        self.applied: dict[int, int] = {}
        self.repeated = 0
        self._covered: dict[tuple[int, int], Ranges] = {}

    def is_new(self, sender: int, number: int, marks: Iterable[Sequence[int]]) -> bool:
        """Note a push; whether it is to be applied.

        Args:
            sender: its rank.
            number: of the push among the sender's, from 1 on; 0 where nobody counts.
            marks: (loader, epoch, begin, end): places of the data that it is made of.
        """
        if number:
            if number <= self.applied.get(sender, 0):
                return False
            self.applied[sender] = number
        return self._cover(marks)

    def _cover(self, marks: Iterable[Sequence[int]]) -> bool:
        places = new = 0
        for loader, epoch, begin, end in marks:
            key = loader, epoch
            if key not in self._covered:
                self._covered[key] = Ranges()
                self._forget(loader)
            places += end - begin
            new += self._covered[key].add(begin, end)
        if places and not new:
            return False
        self.repeated += places - new
        return True

    def _forget(self, loader: int) -> None:
        """Drop epochs that are long over."""
        for key in sorted(key for key in self._covered if key[0] == loader)[:-EPOCHS]:
            del self._covered[key]

    def state(self) -> dict[str, Any]:
        """For a replica or a checkpoint; JSON's terms."""
        covered = [[list(key), places.state()] for key, places in self._covered.items()]
        return {"applied": [list(pair) for pair in self.applied.items()], "covered": covered}

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave; {} where nothing was pushed yet."""
        self.applied = {sender: number for sender, number in state.get("applied", ())}
        self._covered = {(key[0], key[1]): Ranges(places) for key, places in state.get("covered", ())}

# SPDX-License-Identifier: Apache-2.0
"""Which pushes are in a shard: by number, and by the samples that they were computed on.

Every worker numbers its pushes by its clock. A push whose number the shard has already was sent again, because an owner
was lost before the sender knew that a replica holds the push. So sending a push again is harmless.

The last push of a worker that dies may have reached only some shards. Its samples go to another worker, which pushes
them to all shards; those that have them already skip them. So each shard remembers which samples are in it. Such
samples are pushed again one minibatch at a time (:mod:`.partial_pushes`), so that a shard has all of a push or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.data.ledger.epoch_ledger import Mark
from paceline.data.ledger.ranges import Ranges

EPOCHS = 8
"""Epochs of a loader whose samples are remembered; an epoch begins when the one before it is in every shard."""


class PushNumbers:
    """The pushes that one shard has seen.

    Attributes:
        applied: sender -> number of its last push.
        repeated: samples that are in the shard twice, because they came again together with new ones.
    """

    def __init__(self) -> None:
        self.applied: dict[int, int] = {}
        self.repeated = 0
        self._covered: dict[tuple[int, int], Ranges] = {}

    def is_new(self, sender: int, number: int, marks: Iterable[Sequence[int]]) -> bool:
        """Note a push; whether to apply it.

        Args:
            sender: its rank.
            number: of the push among the sender's, from 1 on; 0 for one that is not counted.
            marks: (loader, epoch, begin, end): its sample ranges.
        """
        if number:
            if number <= self.applied.get(sender, 0):
                return False
            self.applied[sender] = number
        return self._cover(marks)

    def _cover(self, marks: Iterable[Sequence[int]]) -> bool:
        samples = new = 0
        for loader, epoch, begin, end in marks:
            key = loader, epoch
            if key not in self._covered:
                self._covered[key] = Ranges()
                self._forget(loader)
            samples += end - begin
            new += self._covered[key].add(begin, end)
        if samples and not new:
            return False
        self.repeated += samples - new
        return True

    def _forget(self, loader: int) -> None:
        """Drop all but the last epochs."""
        for key in sorted(key for key in self._covered if key[0] == loader)[:-EPOCHS]:
            del self._covered[key]

    def marks(self) -> list[Mark]:
        """The samples that are in the shard, of the last epochs."""
        return [(*key, begin, end) for key, places in self._covered.items() for begin, end in places]

    def state(self) -> dict[str, Any]:
        """The state for a replica or a checkpoint, as JSON types."""
        covered = [[list(key), places.state()] for key, places in self._covered.items()]
        return {"applied": [list(pair) for pair in self.applied.items()], "covered": covered}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave; {} for no pushes."""
        self.applied = {sender: number for sender, number in state.get("applied", ())}
        self._covered = {(key[0], key[1]): Ranges(places) for key, places in state.get("covered", ())}

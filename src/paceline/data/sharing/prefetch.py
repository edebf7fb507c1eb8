# SPDX-License-Identifier: Apache-2.0
"""Tells a data set which samples come next, so that it can fetch them in the background.

A data set may have any of these attributes; those of `paceline.data` do::

    prefetch(ids)       fetch in the background what these samples need, in this order; replaces earlier hints
    shard_sizes         samples of each shard: neighbours in the data set lie in one file
    shuffle_buffer      shards whose samples are mixed with each other
    turns               whether every epoch begins with the shards that the last one ended with
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.data.ledger.ranges import Ranges
from paceline.data.sampling.assignment import Assignment, Portion
from paceline.data.sampling.order import InShards
from paceline.data.sampling.sampler import SamplingPlan

BATCHES = 16
"""Prefetch distance for a data set without shards, in batches."""


class Prefetch:
    """Sends prefetch hints as batches are begun."""

    def __init__(self, plan: SamplingPlan, assignment: Assignment, epoch: int) -> None:
        self._plan, self._assignment = plan, assignment
        self._prefetch = getattr(plan.loader.dataset, "prefetch", None)
        order = plan.order(epoch) if self._prefetch is not None else None
        self._batches = BATCHES
        if isinstance(order, InShards):
            self._batches = max(BATCHES, 2 * order.window // plan.unit)
        self._left = 0
        self._told: dict[int, Ranges] = {}

    def begun(self, portion: Portion) -> None:
        """A batch was begun; every quarter of the distance, send the next hints."""
        if self._prefetch is None:
            return
        if self._left == 0 or portion.places[0][0] not in self._told.get(portion.epoch, ()):
            self._left = self._batches // 4
            self._tell([portion, *self._assignment.coming(self._batches)])
        self._left -= 1

    def _tell(self, portions: Sequence[Portion]) -> None:
        ids: list[Any] = []
        self._told = {}
        for portion in portions:
            hinted = self._told.setdefault(portion.epoch, Ranges())
            for place in portion.places:
                hinted.add(*place)
            order = self._plan.order(portion.epoch)
            if isinstance(order, InShards):
                ids += [order.first(shard) for shards, _ in order.windows(portion.places) for shard in shards]
            else:
                ids += self._plan.ids(portion, lambda: portions)
        assert self._prefetch is not None
        self._prefetch(list(dict.fromkeys(ids)))

# SPDX-License-Identifier: Apache-2.0
"""Whose push arrives next, where each worker computes without a pause and the network takes no time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from paceline.forecast.sim.clock import Clock


def arrivals(clock: Clock, workers: int) -> Iterator[int]:
    """Ranks in the order in which their pushes arrive, without end; a worker begins anew when its push has arrived."""
    step = [0] * workers
    ends = [(clock.compute_s(rank, 0), rank) for rank in range(workers)]
    heapq.heapify(ends)
    while True:
        now, rank = heapq.heappop(ends)
        yield rank
        step[rank] += 1
        heapq.heappush(ends, (now + clock.compute_s(rank, step[rank]), rank))

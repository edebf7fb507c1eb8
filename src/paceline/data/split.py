# SPDX-License-Identifier: Apache-2.0
"""The split of an epoch over workers: a pure function of (order, batch size, N), so that no traffic is needed.

An epoch is cut into rounds. In a full round each of N workers takes one batch of b samples, worker r the samples
r b .. (r+1) b (excl.) of the round, so that a round holds what one worker alone would have seen in one batch of N b.
What remains is neither dropped nor repeated: it becomes one more round of smaller batches, as even as can be; where it
has fewer than two samples for each worker, the last two rounds are cut anew, so that everybody always has
something to do and all workers make the same number of steps. Only where that is impossible (fewer samples than
workers, or batches of one) do some workers get one batch less.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

Item = TypeVar("Item")


def even_parts(count: int, parts: int) -> list[tuple[int, int]]:
    """Cut 0 .. count into `parts` ranges whose sizes differ by at most one, the longer first."""
    small, longer = divmod(count, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + small + (1 if part < longer else 0))
    return list(pairwise(bounds))


def round_bounds(samples: int, batch: int, workers: int) -> list[tuple[int, int]]:
    """(begin, end excl.) of every round of an epoch of `samples` samples."""
    width = batch * workers
    bounds = [(k * width, (k + 1) * width) for k in range(samples // width)]
    begin = len(bounds) * width
    rest = samples - begin
    if rest == 0:
        return bounds
    least = workers if batch < 4 else 2 * workers  # batches of one sample are what BatchNorm cannot take
    if rest < least and bounds and batch >= 2:
        begin, _ = bounds.pop()
        middle = begin + (width + rest + 1) // 2
        return [*bounds, (begin, middle), (middle, samples)]
    return [*bounds, (begin, samples)]


def worker_batches(samples: int, batch: int, workers: int, rank: int) -> list[tuple[int, int]]:
    """(begin, end excl.) into the epoch's order, for each batch of worker `rank`.

    The union over the workers is 0 .. samples, without overlap.
    """
    found = []
    for begin, end in round_bounds(samples, batch, workers):
        if end - begin == batch * workers:
            found.append((begin + rank * batch, begin + (rank + 1) * batch))
            continue
        low, high = even_parts(end - begin, workers)[rank]
        if low < high:
            found.append((begin + low, begin + high))
    return found


def deal_batches(batches: Sequence[Sequence[Item]], workers: int, rank: int) -> list[Sequence[Item]]:
    """Batches that a sampler made are dealt one to each worker in turn; the samples of the last few evenly."""
    full = len(batches) // workers * workers
    found: list[Sequence[Item]] = list(batches[rank:full:workers])
    rest = [item for batch in batches[full:] for item in batch]
    if rest:
        low, high = even_parts(len(rest), workers)[rank]
        if low < high:
            found.append(rest[low:high])
    return found

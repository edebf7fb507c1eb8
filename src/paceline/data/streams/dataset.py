# SPDX-License-Identifier: Apache-2.0
"""Data of unknown length that can only be read in order, shard by shard: tars, text files, streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.core import rng
from paceline.data.sampling.permutation import Permutation
from paceline.data.sampling.shard_progress import MOST_SHARDS


class Shards(Protocol):
    """What can be read shard by shard. It goes to loader processes, so it must be possible to pickle it."""

    def __len__(self) -> int:
        """Number of shards."""

    def read(self, shard: int, skip: int) -> Iterator[Any]:
        """The samples of a shard, without its first `skip`; the same ones in the same order every time."""


class ShardStream(IterableDataset[Any]):
    """Shards as a data set for a `DataLoader` with batch_size, num_workers and collate_fn as usual.

    ::

        stream = paceline.data.ShardStream(paceline.data.text_lines(["a.txt.gz", "b.txt.gz"]))
        for batch in run.share(DataLoader(stream, batch_size=32, num_workers=2)): ...

    >>> import tempfile
    >>> from pathlib import Path
    >>> from torch.utils.data import DataLoader
    >>> from paceline.data import ShardStream, text_lines
    >>> path = Path(tempfile.mkdtemp()) / "lines.txt"
    >>> _ = path.write_text("one\\ntwo\\nthree\\n")
    >>> list(DataLoader(ShardStream(text_lines([path])), batch_size=2))
    [['one', 'two'], ['three']]

    `run.share` deals shards to workers, so that each shard is read by one worker only, and by one of its loader
    processes. Under an asynchronous rule a worker that finishes a shard gets the next; under other rules worker r of
    N takes every N-th of the epoch's order. Then **the number of batches of the workers differs where shards are
    unequal**; give shards of about the same size, and as many that N divides their number. There must be at least N.

    A batch lies within one shard: the last batch of a shard may be a smaller one, and `drop_last=True` leaves that one
    out. Every sample is seen once an epoch, whatever the number of loader processes, after a resume in the middle of a
    shard, and on another number of workers. With loader processes the order of batches after a resume may be another
    than without the stop; in one process it is the same.

    Args:
        shards: what to read; :func:`paceline.data.text_lines` and its neighbours make them.
        shuffle: whether shards come in a new random order in each epoch.
        buffer: samples of a shard that are mixed, so many at a time; they are held in memory. 0: as they lie.

    Raises:
        ValueError: there is no shard, or there are too many; a negative buffer.
    """

    def __init__(self, shards: Shards, shuffle: bool = True, buffer: int = 0) -> None:
        if not 1 <= len(shards) <= MOST_SHARDS:
            raise ValueError(f"a stream needs 1 to {MOST_SHARDS} shards, got {len(shards)}; check what is read")
        if buffer < 0:
            raise ValueError(f"buffer must be a number of samples, 0 or more, got {buffer}")
        self.shards, self.shuffle, self.buffer = shards, shuffle, buffer

    def order(self, seed: int, epoch: int) -> Sequence[int]:
        """The shards of an epoch, in order."""
        count = len(self.shards)
        if not self.shuffle:
            return range(count)
        found: list[int] = Permutation(count, rng.mix(seed, epoch)).at(np.arange(count)).tolist()
        return found

    def read(self, shard: int, skip: int, seed: int, epoch: int) -> Iterator[Any]:
        """The samples of a shard in an epoch's order, without the first `skip`."""
        if self.buffer < 2:
            return iter(self.shards.read(shard, skip))
        return self._mixed(shard, skip, seed, epoch)

    def _mixed(self, shard: int, skip: int, seed: int, epoch: int) -> Iterator[Any]:
        block, inside = divmod(skip, self.buffer)
        samples = iter(self.shards.read(shard, block * self.buffer))
        while held := list(islice(samples, self.buffer)):
            key = rng.mix(seed, epoch, shard, block)
            for place in Permutation(len(held), key).at(np.arange(inside, len(held))).tolist():
                yield held[place]
            block, inside = block + 1, 0

    def __iter__(self) -> Iterator[Any]:
        """Without `run.share`: everything; each loader process has its own shards."""
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        seed = info.seed - info.id if info is not None else int(torch.empty((), dtype=torch.int64).random_().item())
        for shard in self.order(seed, 0)[first::step]:
            yield from self.read(shard, 0, seed, 0)

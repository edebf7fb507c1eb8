# SPDX-License-Identifier: Apache-2.0
"""Data of unknown length that can only be read in order, shard by shard, such as tars and text files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.core import rng
from paceline.data.sampling.order import Permutation
from paceline.data.sampling.position import MOST_SHARDS


class Shards(Protocol):
    """Data that are read shard by shard; they are sent to loader processes, so they must be picklable."""

    def __len__(self) -> int:
        """Number of shards."""

    def read(self, shard: int, skip: int) -> Iterator[Any]:
        """The samples of a shard, without its first `skip`; always the same ones in the same order."""


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

    `run.share` assigns each shard to one worker, which reads it in one loader process. Under an asynchronous rule a
    worker that finishes a shard gets the next one; under other rules worker r of N takes every N-th of the epoch's
    order. Then **workers make different numbers of batches if shards are unequal**; give shards of about the same
    size, in a number that N divides. There must be at least N.

    A batch lies within one shard: the last batch of a shard may be smaller, and `drop_last=True` drops it. Every
    sample is seen once an epoch, whatever the number of loader processes, also after a resume in the middle of a
    shard or on another number of workers. With loader processes, a resume may change the order of batches.

    Args:
        shards: the data; make them with :func:`paceline.data.text_lines` or a function like it.
        shuffle: whether each epoch has a new random order of shards.
        buffer: number of samples of a shard that are held in memory and shuffled; 0 keeps their order.

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
        shards: list[int] = Permutation(count, rng.mix(seed, epoch)).at(np.arange(count)).tolist()
        return shards

    def read(self, shard: int, skip: int, seed: int, epoch: int) -> Iterator[Any]:
        """The samples of a shard in the epoch's order, without the first `skip`."""
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
        """Without `run.share`: all shards, distributed over the loader processes."""
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        seed = info.seed - info.id if info is not None else int(torch.empty((), dtype=torch.int64).random_().item())
        for shard in self.order(seed, 0)[first::step]:
            yield from self.read(shard, 0, seed, 0)

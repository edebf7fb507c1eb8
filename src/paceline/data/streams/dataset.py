# SPDX-License-Identifier: Apache-2.0
"""Data of unknown length that can only be read in order, shard by shard, such as tars and text files.

Batches are read with the settings of the user's `DataLoader`. Each loader process reads a shard of its own. A
`DataLoader` sends requests to its W processes round-robin, so the j-th request goes to process j mod W. Here each
process has a queue, which requests the batches of one shard in order; the process keeps the shard's iterator open. The
process reads one sample ahead, so that its answer tells whether the shard is over; requests already sent then return
empty. Without loader processes there is one queue.

A request that reaches another process is only slow: that process opens the shard and skips.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from paceline.core import rng
from paceline.data.ledger.ranges import Range, Ranges
from paceline.data.sampling.batches import samples_in
from paceline.data.sampling.position import MOST_SHARDS, UNIT, ShardProgress, cut_at_shards, round_robin
from paceline.data.sampling.sampler import Permutation
from paceline.data.sampling.split import Assignment, Portion
from paceline.data.workers.loader import PassSampler, inner_settings


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


# -- batches of assigned shards ------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """Samples `begin` .. `begin` + `count` (excl.) of a shard; fewer at its end."""

    epoch: int
    shard: int
    begin: int
    count: int


Answer = tuple[Any, int, bool]
"""A batch (None if empty), its number of samples, and whether the shard is over."""


@dataclass(frozen=True)
class ShardBatch:
    """The batch of some places."""

    portion: Portion
    batch: Any  # valid if there are samples
    samples: int  # in the batch; 0 if the shard was over, or `drop_last` drops its last samples


class ShardAssignment:
    """The worker's shards of the `rest` of an epoch under rules without leases, in order."""

    def __init__(self, epoch: int, rest: Ranges, workers: int, rank: int, shard_progress: ShardProgress) -> None:
        self._epoch = epoch
        self._left = deque(cut_at_shards(round_robin(rest, workers, rank).without(shard_progress.all)))

    def next(self, wait: bool) -> Portion | None:
        return Portion(self._epoch, [self._left.popleft()]) if self._left else None

    def known(self) -> list[Portion]:
        return [Portion(self._epoch, [places]) for places in self._left]

    def coming(self, batches: int) -> list[Portion]:
        return self.known()


class ShardReading:
    """Reads the assigned shards of a loader with a :class:`ShardStream`."""

    def __init__(self, users: DataLoader[Any], seed: int) -> None:
        assert isinstance(users.dataset, ShardStream)
        self.stream = users.dataset
        self._seed = seed
        self._queues: _ProcessQueues | None = None
        self._width, self._count = max(1, users.num_workers), users.batch_size or 1
        self._source = PassSampler()
        reader = _Reader(self.stream, users.collate_fn, users.batch_size, users.drop_last, seed)
        self._loader: DataLoader[Any] = DataLoader(reader, **inner_settings(users, self._source))

    @property
    def places(self) -> int:
        return len(self.stream.shards) * UNIT

    def batches(self, assignment: Assignment) -> Iterator[ShardBatch]:
        """The batches of the assigned places, until no request is pending and no place is left."""
        while (first := assignment.next(wait=True)) is not None:
            self._queues = queues = _ProcessQueues(assignment, first, self._width, self._count, self._order)
            self._source.send(queues)
            try:
                for answer in self._loader:
                    batch = queues.answered(answer)
                    if batch is not None:
                        yield batch
            finally:
                self._queues = None
                self._source.send(iter(()))  # a reference cycle would keep processes alive

    def begun(self) -> list[Portion]:
        """The places of open shards that were not handed out."""
        return self._queues.begun() if self._queues is not None else []

    def _order(self, epoch: int, number: int) -> int:
        return self.stream.order(self._seed, epoch)[number]


class _ShardPart:
    """A shard, or the rest of one."""

    def __init__(self, epoch: int, shard: int, places: Range) -> None:
        self.epoch, self.shard = epoch, shard
        self.asked, self.end = places  # `asked`, `handed`: the places up to which batches were requested, handed out
        self.handed = self.asked
        self.over = False

    @property
    def open(self) -> bool:
        return not self.over and self.asked < self.end

    def ask(self, most: int) -> Request:
        """The request for the next batch."""
        count = min(most, self.end - self.asked)
        request = Request(self.epoch, self.shard, self.asked % UNIT, count)
        self.asked += count
        return request


class _ProcessQueues:
    """Sends requests to the loader processes round-robin, and matches their answers."""

    def __init__(
        self, assignment: Assignment, first: Portion, width: int, count: int, order: Callable[[int, int], int]
    ) -> None:
        self._assignment, self._count, self._order = assignment, count, order
        self._first: Portion | None = first
        self._queues: list[_ShardPart | None] = [None] * width
        self._turn, self._dry = 0, False
        self._sent: deque[tuple[_ShardPart, int] | None] = deque()
        self._begun: list[_ShardPart] = []

    def __iter__(self) -> Iterator[Request | None]:
        return self

    def __next__(self) -> Request | None:
        part = self._queues[self._turn]
        if part is None or not part.open:
            part = self._queues[self._turn] = self._open_next()
        if part is None and not any(one is not None and one.open for one in self._queues):
            raise StopIteration
        self._turn = (self._turn + 1) % len(self._queues)
        if part is None:  # other processes still have work, so skip this one's turn
            self._sent.append(None)
            return None
        request = part.ask(self._count)
        self._sent.append((part, part.asked))
        return request

    def _open_next(self) -> _ShardPart | None:
        portion, self._first = self._first, None
        if portion is None and not self._dry:
            portion = self._assignment.next(wait=False)
            self._dry = portion is None  # `ShardReading.batches` asks again, and waits
        if portion is None:
            return None
        ((begin, end),) = portion.places
        part = _ShardPart(portion.epoch, self._order(portion.epoch, begin // UNIT), (begin, end))
        self._begun.append(part)
        return part

    def answered(self, answer: Answer | None) -> ShardBatch | None:
        """The batch of the oldest pending request; None if it came back empty."""
        sent = self._sent.popleft()
        if sent is None or answer is None or sent[0].over:
            return None
        part, end = sent
        batch, samples, part.over = answer
        begin, part.handed = part.handed, part.end if part.over else end
        if part.handed == part.end:
            self._begun.remove(part)
        return ShardBatch(Portion(part.epoch, [(begin, part.handed)]), batch, samples)

    def begun(self) -> list[Portion]:
        """The places of open shards that were not handed out."""
        return [Portion(part.epoch, [(part.handed, part.end)]) for part in self._begun]


class _Reader(Dataset[Any]):
    """The data set in a loader process, indexed by requests."""

    def __init__(
        self, stream: ShardStream, collate: Callable[[Any], Any], batch_size: int | None, drop_last: bool, seed: int
    ) -> None:
        self.users = stream
        self._collate, self._batch_size, self._drop_last, self._seed = collate, batch_size, drop_last, seed
        self._open_shard: _OpenShard | None = None

    def __getitem__(self, request: Request | None) -> Answer | None:
        if request is None:
            return None
        if get_worker_info() is not None:
            rng.seed_all(rng.mix(self._seed, request.epoch, request.shard, request.begin))
        open_shard, self._open_shard = self._opened(request), None  # closed, if an error follows
        samples = open_shard.take(request.count)
        self._open_shard = open_shard
        if not samples or (self._drop_last and open_shard.over and len(samples) < (self._batch_size or 1)):
            return None, 0, open_shard.over
        if self._batch_size is None:
            batch = self._collate(samples[0])
            return batch, samples_in(batch) or 1, open_shard.over
        return self._collate(samples), len(samples), open_shard.over

    def _opened(self, request: Request) -> _OpenShard:
        opened, key = self._open_shard, (request.epoch, request.shard)
        ended = opened is not None and opened.over and opened.at <= request.begin
        if opened is None or opened.key != key or (opened.at != request.begin and not ended):
            samples = self.users.read(request.shard, request.begin, self._seed, request.epoch)
            opened = _OpenShard(key, samples, request.begin)
        return opened


class _OpenShard:
    """An open shard, named by (epoch, shard); `at` is the index of the next sample, `over` whether there is none."""

    def __init__(self, key: tuple[int, int], samples: Iterator[Any], at: int) -> None:
        self.key, self._samples, self.at, self.over = key, samples, at, False
        self._lookahead: list[Any] = []

    def take(self, count: int) -> list[Any]:
        """The next samples; reads one more to see whether the shard is over."""
        taken = [*self._lookahead, *islice(self._samples, count - len(self._lookahead))]
        self._lookahead = list(islice(self._samples, 1)) if len(taken) == count else []
        self.over = not self._lookahead
        self.at += len(taken)
        return taken

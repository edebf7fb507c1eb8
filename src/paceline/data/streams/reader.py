# SPDX-License-Identifier: Apache-2.0
"""Batches read from shards, with the settings of the user's `DataLoader`.

Each loader process reads a shard of its own. A `DataLoader` gives requests to its W processes in turn, so the j-th
request goes to process j mod W; here is a lane for each of them, and a lane asks for one batch after another of its
shard, whose iterator stays open in the process. An answer tells whether the shard is over: the process reads one sample
ahead. Requests that were under way by then come back empty. In the training process there is one lane.

Should a request go to another process, nothing is wrong but slow: that process opens the shard and skips.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset, get_worker_info

from paceline.core import rng
from paceline.data.ledger.ranges import Range, Ranges
from paceline.data.sampling.assignment import Assignment, Portion
from paceline.data.sampling.batches import samples_in
from paceline.data.sampling.shard_progress import UNIT, ShardProgress, pieces, round_robin
from paceline.data.streams.dataset import ShardStream
from paceline.data.workers.loader import PassSampler, inner_settings


@dataclass(frozen=True)
class Request:
    """Samples `begin` .. `begin` + `count` (excl.) of a shard, or as many as there are."""

    epoch: int
    shard: int
    begin: int
    count: int


Answer = tuple[Any, int, bool]
"""A batch (None if there is nothing), its samples, and whether the shard is over."""


@dataclass(frozen=True)
class ShardBatch:
    """What came of places.

    Attributes:
        portion: the places.
        batch: of them; only where there are samples.
        samples: in it; 0 where a shard was over, or what was left of it is dropped.
    """

    portion: Portion
    batch: Any
    samples: int


class ShardAssignment:
    """The worker's part of shards that are dealt, one after another.

    Args:
        epoch: of the order.
        rest: the places that are left of the epoch.
        workers: that they are dealt to.
        rank: of the worker.
        consumed: what it has done of them.
    """

    def __init__(self, epoch: int, rest: Ranges, workers: int, rank: int, shard_progress: ShardProgress) -> None:
        self._epoch = epoch
        self._left = deque(pieces(round_robin(rest, workers, rank).without(shard_progress.all)))

    def next(self, wait: bool) -> Portion | None:
        """The next piece; None at the end."""
        return Portion(self._epoch, [self._left.popleft()]) if self._left else None

    def known(self) -> list[Portion]:
        """The pieces that come next."""
        return [Portion(self._epoch, [piece]) for piece in self._left]

    def coming(self, batches: int) -> list[Portion]:
        """The pieces that come next."""
        return self.known()


class ShardReading:
    """Reads the shards that a supply gives.

    Args:
        users: a loader with a :class:`ShardStream`.
        seed: of the order, and of what is random in loader processes.
    """

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
        """Places of an epoch."""
        return len(self.stream.shards) * UNIT

    def batches(self, assignment: Assignment) -> Iterator[ShardBatch]:
        """Batches of the pieces of shards that the supply gives, until it has none and nothing is under way."""
        while (first := assignment.next(wait=True)) is not None:
            self._queues = queues = _ProcessQueues(assignment, first, self._width, self._count, self._order)
            self._source.now = queues
            try:
                for answer in self._loader:
                    found = queues.answered(answer)
                    if found is not None:
                        yield found
            finally:
                self._queues, self._source.now = None, iter(())  # no circle of references keeps processes alive

    def begun(self) -> list[Portion]:
        """What is left of the shards that are open."""
        return self._queues.begun() if self._queues is not None else []

    def _order(self, epoch: int, number: int) -> int:
        return self.stream.order(self._seed, epoch)[number]


class _ShardPart:
    """A shard, or what is left of one.

    Attributes:
        asked, handed: places from `begin` on up to which batches were asked for, and handed out.
    """

    def __init__(self, epoch: int, shard: int, places: Range) -> None:
        self.epoch, self.shard = epoch, shard
        self.asked, self.end = places
        self.handed = self.asked
        self.over = False

    @property
    def open(self) -> bool:
        """Whether there may be more to ask for."""
        return not self.over and self.asked < self.end

    def ask(self, most: int) -> Request:
        """For the next batch."""
        count = min(most, self.end - self.asked)
        request = Request(self.epoch, self.shard, self.asked % UNIT, count)
        self.asked += count
        return request


class _ProcessQueues:
    """Requests for the loader processes in turn, and what to make of their answers."""

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
        piece = self._queues[self._turn]
        if piece is None or not piece.open:
            piece = self._queues[self._turn] = self._open_next()
        if piece is None and not any(one is not None and one.open for one in self._queues):
            raise StopIteration
        self._turn = (self._turn + 1) % len(self._queues)
        if piece is None:  # the other processes are still at work, and this one's turn has to pass
            self._sent.append(None)
            return None
        request = piece.ask(self._count)
        self._sent.append((piece, piece.asked))
        return request

    def _open_next(self) -> _ShardPart | None:
        portion, self._first = self._first, None
        if portion is None and not self._dry:
            portion = self._assignment.next(wait=False)
            self._dry = portion is None  # near the end: a worker without any piece asks again, and waits
        if portion is None:
            return None
        ((begin, end),) = portion.places
        piece = _ShardPart(portion.epoch, self._order(portion.epoch, begin // UNIT), (begin, end))
        self._begun.append(piece)
        return piece

    def answered(self, answer: Answer | None) -> ShardBatch | None:
        """What came of the request that was made first."""
        sent = self._sent.popleft()
        if sent is None or answer is None or sent[0].over:
            return None
        piece, end = sent
        batch, samples, piece.over = answer
        begin, piece.handed = piece.handed, piece.end if piece.over else end
        if piece.handed == piece.end:
            self._begun.remove(piece)
        return ShardBatch(Portion(piece.epoch, [(begin, piece.handed)]), batch, samples)

    def begun(self) -> list[Portion]:
        """What was not handed out of the shards that are open."""
        return [Portion(piece.epoch, [(piece.handed, piece.end)]) for piece in self._begun]


class _Reader(Dataset[Any]):
    """What a loader process asks for batches."""

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
        open_shard, self._open_shard = self._opened(request), None  # an error leaves it closed
        samples = open_shard.take(request.count)
        self._open_shard = open_shard
        if not samples or (self._drop_last and open_shard.over and len(samples) < (self._batch_size or 1)):
            return None, 0, open_shard.over
        if self._batch_size is None:
            batch = self._collate(samples[0])
            return batch, samples_in(batch) or 1, open_shard.over
        return self._collate(samples), len(samples), open_shard.over

    def _opened(self, request: Request) -> _OpenShard:
        found, key = self._open_shard, (request.epoch, request.shard)
        if found is None or found.key != key or (found.at != request.begin and not found.ended_before(request.begin)):
            samples = self.users.read(request.shard, request.begin, self._seed, request.epoch)
            found = _OpenShard(key, samples, request.begin)
        return found


class _OpenShard:
    """An open shard.

    Attributes:
        key: epoch and shard.
        at: number of the next sample.
        over: whether there is none.
    """

    def __init__(self, key: tuple[int, int], samples: Iterator[Any], at: int) -> None:
        self.key, self._samples, self.at, self.over = key, samples, at, False
        self._lookahead: list[Any] = []

    def take(self, count: int) -> list[Any]:
        """The next samples, and one more to see whether there is one."""
        found = [*self._lookahead, *islice(self._samples, count - len(self._lookahead))]
        self._lookahead = list(islice(self._samples, 1)) if len(found) == count else []
        self.over = not self._lookahead
        self.at += len(found)
        return found

    def ended_before(self, begin: int) -> bool:
        """Whether a request that was under way goes beyond the end."""
        return self.over and self.at <= begin

# SPDX-License-Identifier: Apache-2.0
"""What is checked of an asynchronous run at its end: every sample is in every shard exactly once for each epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.data.ledger.ledger import Ledger
from paceline.rules.topology.sharded import UNIT


@dataclass
class Ended:
    """What a worker ended with.

    Attributes:
        times: how often each sample is in each shard, shape (shards, 64).
        pushes: that it made.
        threads: of its process that still run, by name.
    """

    times: Tensor
    pushes: int
    threads: list[str]


@dataclass
class Worker:
    """What is known of a worker.

    Attributes:
        rank: its number.
        ended: if it came to the end of its program.
        error: that ended it.
        killed: whether it was.
        service: that it has attached.
        early: samples that it leased as a new keeper of the ledger, before the worker that holds them said so.
    """

    rank: int
    ended: Ended | None = None
    error: BaseException | None = None
    killed: bool = False
    service: Any = None
    early: int = 0
    _server: Any = None
    _told: Callable[[str, str], None] = lambda kind, said: None

    def attached(self, engine: Any, told: Callable[[str, str], None]) -> None:
        """Its run has begun; `told` gets its events."""
        self.service, self._server, self._told = engine._service, engine._shards.server, told
        ledger, holds = engine._shards.ledger, engine._shards.ledger.holds

        def checked(worker: int, marks: Sequence[Sequence[int]]) -> None:
            self.early += leased_to_others(ledger, worker, marks)
            holds(worker, marks)

        ledger.holds = checked

    @property
    def members(self) -> Any:
        """Whom it takes for lost, and for the owners of shards."""
        return self.service.context.membership

    def note(self, kind: str, **fields: Any) -> None:
        """An event of its log."""
        if kind in ("inexact", "takeover", "lost", "error"):
            self._told(kind, ", ".join(f"{name} {value}" for name, value in fields.items()))

    def rows(self) -> list[str]:
        """Shards of this worker that are not what it ended with, and replicas of the same version that differ."""
        assert self.ended is not None
        found = []
        for number, shard in self._server.shards.items():
            if not torch.equal(shard.anchor, self.ended.times[number]):
                found.append(f"shard {number} at its owner, rank {self.rank}, is not what rank {self.rank} ended with")
        return found

    def replicas(self, owner: Worker) -> list[str]:
        """Replicas here that differ from the shards of `owner` at the same version."""
        found = []
        for number, (about, row) in self._server._replicas.items():
            shard = owner._server.shards.get(number)
            if shard is None or self.members.owners[number] != owner.rank or about["version"] != shard.version:
                continue
            if not torch.equal(row[:UNIT], shard.anchor):
                found.append(f"the replica of shard {number} at rank {self.rank} differs from the shard")
        return found


def leased_to_others(ledger: Ledger, worker: int, marks: Sequence[Sequence[int]]) -> int:
    """How many of these samples, which `worker` holds, the ledger has leased to others."""
    found = 0
    for loader, epoch, begin, end in marks:
        book = ledger.epochs.get(loader, epoch)
        for rank, leased in book.leased.items() if book is not None else ():
            found += sum(high - low for low, high in leased.within(begin, end)) if rank != worker else 0
    return found


def problems_of(workers: Sequence[Worker], epochs: int, samples: int, safe: set[int]) -> list[str]:
    """What is wrong at the end.

    Args:
        workers: all, by rank.
        epochs, samples: of the training.
        safe: workers to which no fault has happened.
    """
    size = len(workers)
    ended = [one for one in workers if one.ended is not None]
    problems = [*_errors(workers), *_sides(ended)]
    problems += [
        f"rank {one.rank} leased {one.early} samples that another worker holds, before that could say so"
        for one in workers
        if one.early
    ]
    begun = all(one.service is not None for one in workers)  # a death while all begin ends all
    if 2 * len(safe) > size and (begun or ended) and not _without_replica(workers, safe):
        problems += [
            f"rank {rank} did not come to the end, and no fault happened to ranks {sorted(safe)}: {workers[rank].error}"
            for rank in sorted(safe)
            if workers[rank].ended is None
        ]
    if ended:
        problems += _counts(ended[0], epochs, samples)
        for one in ended:
            problems += one.rows()
            problems += [what for other in ended if other is not one for what in one.replicas(other)]
            assert one.ended is not None
            if one.ended.threads:
                problems.append(f"rank {one.rank} has ended, and these threads have not: {one.ended.threads}")
    return problems


def _without_replica(workers: Sequence[Worker], safe: set[int]) -> bool:
    """Whether the run ended because faults have hit two neighbours, an owner and the keeper of its replicas."""
    size = len(workers)
    neighbours = any(rank not in safe and (rank + 1) % size not in safe for rank in range(size))
    return neighbours and any("no other worker has a replica" in str(one.error) for one in workers)


def _errors(workers: Sequence[Worker]) -> list[str]:
    """Errors that do not say who has them."""
    found = []
    for one in workers:
        if one.error is not None and f"[rank {one.rank} of {len(workers)} on host" not in str(one.error):
            found.append(f"an error of rank {one.rank} does not say whose it is: {one.error!r}")
    return found


def _sides(ended: Sequence[Worker]) -> list[str]:
    """Two sides that both went on, and different models.

    Of two workers that part, one cannot know whether its goodbye arrived. So one may take the other for lost once
    neither has more to push; they still have the same model.
    """
    found = []
    for one in ended:
        for other in ended:
            assert one.ended is not None and other.ended is not None
            if other.rank in one.members.lost and other.rank not in one.members.finished:
                found.append(f"ranks {one.rank} and {other.rank} both went on to the end, and one lost the other")
            elif one.rank < other.rank and not torch.equal(one.ended.times, other.ended.times):
                found.append(f"ranks {one.rank} and {other.rank} end with models that differ")
            elif one.rank < other.rank:
                found += _heirs(one, other)
    return found


def _heirs(one: Worker, other: Worker) -> list[str]:
    """Shards that have two owners, of whom none is lost."""
    return [
        f"shard {shard} belongs to rank {owner} by rank {one.rank}, and to rank {second} by rank {other.rank}"
        for shard, owner in one.members.owners.items()
        if (second := other.members.owners[shard]) != owner
        and owner not in other.members.lost
        and second not in one.members.lost
    ]


def _counts(one: Worker, epochs: int, samples: int) -> list[str]:
    """Samples that are lost or repeated."""
    assert one.ended is not None
    times = one.ended.times
    if not torch.equal(times, times.round()):
        return ["shards have parts of samples"]
    more = times[:, :samples] - epochs
    lost, repeated = int((-more).clamp(min=0).sum()), int(more.clamp(min=0).sum())
    if lost or repeated or times[:, samples:].any():
        return [
            f"rank {one.rank} ends with {lost} lost and {repeated} repeated; in shards "
            f"{[number for number in range(len(times)) if bool((times[number, :samples] != epochs).any())]}"
        ]
    return []

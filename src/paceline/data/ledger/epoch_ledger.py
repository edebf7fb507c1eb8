# SPDX-License-Identifier: Apache-2.0
"""Parts of the ledger: what a worker asks of it, the state of one epoch, and the speeds of workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.data.ledger.ranges import Ranges

Mark = tuple[int, int, int, int]
"""(loader, epoch, begin, end): places begin .. end (excl.) of a loader's epoch."""

ENDLESS = 1 << 62
"""Number of places of an epoch whose length is unknown."""
MOST = 16
"""The most units of a lease."""


def by_epoch(marks: Iterable[Sequence[int]]) -> dict[tuple[int, int], Ranges]:
    """The places of each (loader, epoch) that marks name."""
    ranges: dict[tuple[int, int], Ranges] = {}
    for loader, epoch, begin, end in marks:
        ranges.setdefault((loader, epoch), Ranges()).add(begin, end)
    return ranges


@dataclass(frozen=True)
class Question:
    """A worker's lease request."""

    loader: int  # number of the shared loader
    epoch: int
    total: int  # places in an epoch; `ENDLESS` if unknown
    unit: int = 1  # places of a batch or shard; leases are cut at its multiples
    most: int = MOST  # units of a lease
    dry: bool = False  # whether the worker is idle until it gets a lease


class Leases(ABC):
    """A worker's connection to the ledger, over whatever transport."""

    @abstractmethod
    def ask(self, question: Question) -> Mark | None:
        """A lease, or None; with `dry`, None means that the epoch is over for all workers."""

    def hand_out(self, marks: list[Mark]) -> None:  # noqa: B027
        """The program gets a batch of these places next: push work that must not be mixed with it."""

    @abstractmethod
    def leave_early(self, loader: int, epoch: int, marks: list[Mark]) -> None:
        """This worker ends its pass before the epoch is over, and returns these places of its leases."""

    @abstractmethod
    def ends(self, loader: int, epoch: int, total: int) -> None:
        """The loader turned out to have only `total` places in this epoch."""

    def learn(self, news: Any) -> None:  # noqa: B027
        """Take over the ledger's progress as of the parameters that this worker now loads."""

    @abstractmethod
    def done(self, marks: list[Mark]) -> None:
        """This worker used these places without a push, and has nothing left to push."""

    def waits(self, now: bool) -> None:  # noqa: B027
        """Whether this worker waits at a barrier, such as a checkpoint; then no worker waits for its places."""

    @abstractmethod
    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        """When this epoch begins, only these places remain."""

    @abstractmethod
    def state(self) -> dict[str, Any] | None:
        """The ledger's checkpoint state; None on workers that do not keep the ledger."""

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore `state`."""


@dataclass
class EpochLedger:
    """One epoch of one loader."""

    total: int  # places
    free: Ranges  # neither leased nor done
    leased: dict[int, Ranges] = field(default_factory=dict)  # by worker; only workers that have some
    dry: set[int] = field(default_factory=set)  # workers that wait for a lease
    left: bool = False  # whether a worker's program left this epoch early

    @property
    def settled(self) -> bool:
        return not self.free and not any(self.leased.values())

    def shorten(self, total: int) -> None:
        """The epoch turned out to have only `total` places."""
        self.free.remove(total, self.total)
        for worker in list(self.leased):
            self.release(worker, total, self.total)
        self.total = total

    def release(self, worker: int, begin: int, end: int) -> int:
        """`worker` holds begin .. end (excl.) no more; returns how many of them it held."""
        held = self.leased.get(worker)
        if held is None:
            return 0
        released = held.remove(begin, end)
        if not held:
            del self.leased[worker]
        return released

    @property
    def unfinished(self) -> Ranges:
        """The places that are free or leased."""
        return Ranges.joined([*self.free, *(one for held in self.leased.values() for one in held)])

    @property
    def done(self) -> Ranges:
        """The places whose work is in the global model."""
        others = list(self.unfinished)
        gaps = zip([0, *(end for _, end in others)], [*(begin for begin, _ in others), self.total], strict=True)
        return Ranges.joined((begin, end) for begin, end in gaps if begin < end)


class Speeds:
    """How fast workers go through a loader, measured from their marks.

    The speeds are as of the first request after the latest mark, so that not every request costs time for every worker.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[float, int]] = {}  # (loader, worker) -> since when, places
        self._sums: dict[int, _Sum] = {}  # loader -> since its latest mark

    def begin(self, loader: int, worker: int, now: float) -> None:
        """Start measuring `worker`, at its first lease."""
        if (loader, worker) not in self._seen:
            self._seen[loader, worker] = now, 0
            if loader in self._sums:
                self._sums[loader].workers += 1

    def marked(self, loader: int, worker: int, places: int) -> None:
        if (loader, worker) in self._seen:
            began, before = self._seen[loader, worker]
            self._seen[loader, worker] = began, before + places
            self._sums.pop(loader, None)

    def lost(self, worker: int) -> None:
        self._seen = {key: seen for key, seen in self._seen.items() if key[1] != worker}
        self._sums.clear()

    def share(self, loader: int, worker: int, now: float) -> float | None:
        """This worker's share of the summed speed, 0 to 1; None before its first mark.

        Other workers without a mark count with the mean speed.
        """
        whole = self._sums.get(loader)
        if whole is None:
            rates = [self._rate(one, rank, now) for one, rank in self._seen if one == loader]
            known = [rate for rate in rates if rate is not None]
            whole = self._sums[loader] = _Sum(now, sum(known), len(known), len(rates))
        own = self._rate(loader, worker, whole.at) if (loader, worker) in self._seen else None
        return None if own is None else own / whole.speed * whole.known / whole.workers

    def fair_units(self, worker: int, question: Question, units: int, now: float) -> int:
        """Half of this worker's speed share of `units`, clamped to 1 .. `most`."""
        share = self.share(question.loader, worker, now)
        if share is None:  # it may be a straggler
            return 1
        return max(1, min(question.most, int(units * share / 2)))

    def _rate(self, loader: int, worker: int, now: float) -> float | None:
        began, places = self._seen[loader, worker]
        return places / (now - began) if places and now > began else None

    def state(self) -> list[list[float]]:
        return [[*key, *seen] for key, seen in self._seen.items()]

    def load(self, state: list[list[float]], passed: float) -> None:
        """Restore `state`, by a clock that is `passed` seconds ahead of the one then."""
        self._seen = {(int(one), int(rank)): (began + passed, int(n)) for one, rank, began, n in state}
        self._sums.clear()


@dataclass
class _Sum:
    """The speeds of the workers of a loader."""

    at: float  # time of which they are
    speed: float  # their sum, of those that have one, places a second
    known: int  # so many have one
    workers: int

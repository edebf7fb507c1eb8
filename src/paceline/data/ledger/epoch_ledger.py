# SPDX-License-Identifier: Apache-2.0
"""What the ledger is made of: questions, the book of an epoch, and how fast workers are."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.data.ledger.ranges import Ranges

Mark = tuple[int, int, int, int]
"""(loader, epoch, begin, end): places begin .. end (excl.) of a loader's epoch."""

ENDLESS = 1 << 62
"""The number of places where nobody knows it yet."""
MOST = 16
"""Units of a lease, at most."""


@dataclass(frozen=True)
class Question:
    """A worker asks for work.

    Attributes:
        loader: which of the shared loaders, as all workers number them.
        epoch: that it is in.
        total: places in an epoch; `ENDLESS` where that is not known.
        unit: leases are cut at multiples of it (samples of a batch, or of a shard).
        most: units of a lease, at most.
        dry: whether it has nothing left to do, and will wait for the answer.
    """

    loader: int
    epoch: int
    total: int
    unit: int = 1
    most: int = MOST
    dry: bool = False


@dataclass
class EpochLedger:
    """One epoch of one loader.

    Attributes:
        total: places.
        free: of nobody.
        leased: worker -> its places.
        dry: workers that wait for more.
        left: whether somebody left this epoch early, as the user's program wanted it.
    """

    total: int
    free: Ranges
    leased: dict[int, Ranges] = field(default_factory=dict)
    dry: set[int] = field(default_factory=set)
    left: bool = False

    @property
    def settled(self) -> bool:
        """Whether everything is done."""
        return not self.free and not any(self.leased.values())

    def shorten(self, total: int) -> None:
        """It has only so many places."""
        for held in [self.free, *self.leased.values()]:
            held.remove(total, self.total)
        self.total = total

    @property
    def done(self) -> Ranges:
        """What is in the global model."""
        found = Ranges([(0, self.total)]).without(self.free)
        for held in self.leased.values():
            found = found.without(held)
        return found


class Speeds:
    """How fast workers go through a loader, from what they marked."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[float, int]] = {}  # (loader, worker) -> since when, places

    def begin(self, loader: int, worker: int, now: float) -> None:
        """`worker` has its first lease."""
        self._seen.setdefault((loader, worker), (now, 0))

    def marked(self, loader: int, worker: int, places: int) -> None:
        """`worker` has done so many places."""
        if (loader, worker) in self._seen:
            began, before = self._seen[loader, worker]
            self._seen[loader, worker] = began, before + places

    def lost(self, worker: int) -> None:
        """`worker` is gone."""
        self._seen = {key: seen for key, seen in self._seen.items() if key[1] != worker}

    def share(self, loader: int, worker: int, now: float) -> float | None:
        """The part of all workers' speed that is this worker's, 0 to 1; None as long as nothing of it was seen.

        Of whom nothing was seen is taken to be as fast as the others on average.
        """
        rates = {rank: self._rate(one, rank, now) for one, rank in self._seen if one == loader}
        own, known = rates.get(worker), [rate for rate in rates.values() if rate is not None]
        if own is None:
            return None
        mean = sum(known) / len(known)
        return own / sum(mean if rate is None else rate for rate in rates.values())

    def fair_units(self, worker: int, question: Question, units: int, now: float) -> int:
        """Half of what this worker's share of the speed is of `units`, in 1 .. `most`."""
        share = self.share(question.loader, worker, now)
        if share is None:  # it may be slow, and others would wait for it
            return 1
        return max(1, min(question.most, int(units * share / 2)))

    def _rate(self, loader: int, worker: int, now: float) -> float | None:
        began, places = self._seen[loader, worker]
        return places / (now - began) if places and now > began else None

    def state(self) -> list[list[float]]:
        """For a checkpoint."""
        return [[*key, *seen] for key, seen in self._seen.items()]

    def load(self, state: list[list[float]], passed: float) -> None:
        """Put back what `state` gave; the clock shows `passed` seconds more than it did then."""
        self._seen = {(int(one), int(rank)): (began + passed, int(n)) for one, rank, began, n in state}

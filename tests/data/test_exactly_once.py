# SPDX-License-Identifier: Apache-2.0
"""Every place of an epoch enters the model exactly once, whatever becomes of the workers: random histories.

A history is a simulated cluster around the real ledger. Workers of different speeds take leases through the supply that
a shared loader uses, hold batches that they have not pushed, push, die, join and leave early; the keeper of the ledger
is replaced by an older replica of it and of the model; a checkpoint is resumed on other workers. The model is a counter
for every place, and a push changes it and the ledger together, as the owner of a piece does it.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.ledger.epoch_ledger import ENDLESS, Mark, Question, Speeds
from paceline.data.ledger.ledger import Ledger
from paceline.data.ledger.ranges import Ranges
from paceline.data.sampling.position import Position
from paceline.data.sampling.split import LeasedAssignment

property_test = settings(database=None, deadline=None, derandomize=True, max_examples=150)


class MustWait(Exception):
    """There is nothing to do now, and the epoch is not over."""


@dataclass
class Job:
    """What the users' program does.

    Attributes:
        n: places of an epoch of each loader.
        unit: places of a batch.
        epochs: of each loader; a pass over every loader in turn is one.
        loaders: how many.
        endless: whether nobody knows n before it has been seen.
        most: batches of a lease.
        break_after: batches after which a worker leaves a pass; 0 for never.
    """

    n: int
    unit: int = 1
    epochs: int = 1
    loaders: int = 1
    endless: bool = False
    most: int = 16
    break_after: int = 0

    @property
    def passes(self) -> list[tuple[int, int]]:
        """(loader, epoch), in the program's order."""
        return [(loader, epoch) for epoch in range(self.epochs) for loader in range(self.loaders)]


@dataclass
class Worker:
    """A worker, between two batches.

    Attributes:
        rank: its number.
        speed: places a second.
        hoard: batches that it hands out before it pushes them.
        at: which of the passes it is in.
        held: leased, not begun.
        in_hand: handed out, not pushed.
        batches: of the present pass.
    """

    rank: int
    speed: float
    hoard: int = 1
    at: int = 0
    held: deque[Mark] = field(default_factory=deque)
    in_hand: list[Mark] = field(default_factory=list)
    batches: int = 0


class Cluster:
    """A simulated cluster.

    Attributes:
        model: how often each place has entered, shape (loaders, epochs, n).
        left: passes that somebody left early.
        ended: rank -> simulated seconds at which it had made its last batch.
        worked: rank -> places that it pushed.
    """

    def __init__(self, job: Job, workers: list[Worker], ledger: Ledger | None = None, model: Any = None) -> None:
        self.job, self.ledger = job, ledger or Ledger()
        self.model = np.zeros((job.loaders, job.epochs, job.n), np.int64) if model is None else model
        self.workers: dict[int, Worker] = {}
        self.left: set[tuple[int, int]] = set()
        self.ended: dict[int, float] = {}
        self.worked: dict[int, int] = {}
        self.now = 0.0
        self._due: list[tuple[float, int]] = []
        self._replica = self._copy()
        for worker in workers:
            self.join(worker)

    def join(self, worker: Worker) -> None:
        self.workers[worker.rank] = worker
        heapq.heappush(self._due, (self.now, worker.rank))

    @property
    def busy(self) -> list[Worker]:
        """Those who still ask for work."""
        return [worker for worker in self.workers.values() if worker.at < len(self.job.passes)]

    # -- one thing that happens -------------------------------------------------------------------

    def step(self) -> None:
        """Whoever is next makes a batch, or finds that it has to wait."""
        self.now, rank = heapq.heappop(self._due)
        worker = self.workers.get(rank)
        if worker is None or worker.at >= len(self.job.passes):
            return
        loader, epoch = self.job.passes[worker.at]
        try:
            places = self._batch(worker, loader, epoch)
        except MustWait:
            heapq.heappush(self._due, (self.now + 0.5 / worker.speed, rank))
            return
        if places is None or worker.batches == self.job.break_after > 0:
            self._end_pass(worker, loader, epoch, complete=places is None)
        self._again(worker, places or 0)

    def _again(self, worker: Worker, places: int) -> None:
        heapq.heappush(self._due, (self.now + places / worker.speed, worker.rank))
        if len(worker.in_hand) >= worker.hoard:
            self.push(worker)

    def _batch(self, worker: Worker, loader: int, epoch: int) -> int | None:
        """As a shared loader does it: first without waiting, then with."""
        job = self.job
        question = Question(loader, epoch, ENDLESS if job.endless else job.n, job.unit, job.most)
        assignment = LeasedAssignment(Desk(self, worker), question, worker.held)  # type: ignore[arg-type]
        while (portion := assignment.next(wait=False) or assignment.next(wait=True)) is not None:
            (begin, end) = portion.places[0]
            if begin >= job.n:
                worker.held.clear()
                self.ledger.ends(loader, portion.epoch, job.n)
                continue
            worker.in_hand.append((loader, portion.epoch, begin, end))
            worker.batches += 1
            self.ended[worker.rank] = self.now + (end - begin) / worker.speed
            return end - begin
        return None

    def _end_pass(self, worker: Worker, loader: int, epoch: int, complete: bool) -> None:
        if not complete:
            self.ledger.leave_early(worker.rank, loader, epoch, list(worker.held))
            self.left.add((loader, epoch))
        worker.held.clear()
        worker.at, worker.batches = worker.at + 1, 0
        if worker.at == len(self.job.passes):
            self.push(worker)
            self.ledger.lost(worker.rank)  # it has finished

    def push(self, worker: Worker) -> None:
        """What it has in hand enters the model, and the ledger hears of it at the same moment."""
        for loader, epoch, begin, end in worker.in_hand:
            self.model[loader, epoch, begin:end] += 1
            self.worked[worker.rank] = self.worked.get(worker.rank, 0) + end - begin
        self.ledger.done(worker.rank, worker.in_hand)
        worker.in_hand = []

    # -- what goes wrong --------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        """It is gone with all that it had."""
        del self.workers[rank]
        self.ledger.lost(rank)

    def replicate(self) -> None:
        """A copy of the model and of the ledger, elsewhere."""
        self._replica = self._copy()

    @property
    def replica_knows_all_passes(self) -> bool:
        """Whether no pass began and ended since the replica was made: of such a one nobody could know."""
        now = max((worker.at for worker in self.workers.values()), default=0)
        state = self._replica[1]
        begun, over = [tuple(row["key"]) for row in state["books"]], dict(state["closed"])
        return all((one, epoch) in begun or epoch <= over.get(one, -1) for one, epoch in self.job.passes[:now])

    def _copy(self) -> tuple[Any, dict[str, Any]]:
        return self.model.copy(), self.ledger.state()

    def replace_keeper(self) -> None:
        """Who kept the ledger and the model is gone; the replica goes on, and hears from those who live."""
        model, state = self._replica
        self.model, self.ledger = model.copy(), Ledger()
        self.ledger.load(state)
        self.ledger.forget_leases()
        for worker in self.busy:
            self.ledger.holds(worker.rank, [*worker.in_hand, *worker.held])

    def resume(self, workers: list[Worker]) -> Cluster:
        """A checkpoint of this moment, resumed by others."""
        state, ledger = self.ledger.state(self.now), Ledger()
        firsts = []
        for loader in range(self.job.loaders):
            position = Position()
            position.regroup([self._position(worker, loader) for worker in self.workers.values()], state, loader)
            for epoch, rest in [(position.epoch - 1, Ranges()), *position.rest.items()]:  # as the feed does it
                ledger.epochs.expect(loader, epoch, rest)
            firsts.append(position.epoch)
        found = Cluster(self.job, [], ledger, self.model.copy())
        found.left = set(self.left)
        for worker in workers:
            passes = [k for k, (loader, epoch) in enumerate(self.job.passes) if epoch >= firsts[loader]]
            worker.at = min(passes, default=len(self.job.passes))
            found.join(worker)
        return found

    def _position(self, worker: Worker, loader: int) -> dict[str, Any]:
        epochs = sum(one == loader for one, _ in self.job.passes[: worker.at])
        passes = [[epochs, None, 0, 0]]
        return {
            "epoch": epochs,
            "passes": passes,
            "rest": [],
            "played": [],
            "epoch_start": None,
            "leased": True,
            "arranged": [],
        }

    # -- to the end -------------------------------------------------------------------------------

    def run(self, until_places: float = float("inf")) -> Cluster:
        """Until all is done, or so many places have entered."""
        events = 0
        while self.busy and self.model.sum() < until_places:
            self.step()
            events += 1
            assert events < 50_000, "nobody comes to the end"
        return self

    def check(self) -> None:
        """Exactly once; where a pass was left early, at most once."""
        for loader, epoch in self.job.passes:
            row = self.model[loader, epoch]
            assert row.max(initial=0) <= 1, (loader, epoch, "twice", np.flatnonzero(row > 1)[:10])
            if (loader, epoch) not in self.left:
                assert row.min(initial=1) == 1, (loader, epoch, "never", np.flatnonzero(row == 0)[:10])
        assert self.ledger.repeated == 0


class Desk:
    """A worker's way to the ledger, without a connection."""

    def __init__(self, cluster: Cluster, worker: Worker) -> None:
        self._cluster, self._worker = cluster, worker

    def ask(self, question: Question) -> Mark | None:
        mark = self._cluster.ledger.ask(self._worker.rank, question, self._cluster.now)
        if mark is None and question.dry and not self._cluster.ledger.over(question.loader, question.epoch):
            raise MustWait
        return mark


# -- the case that was promised -------------------------------------------------------------------


def workers(*speeds: float, first: int = 0, hoard: int = 1) -> list[Worker]:
    return [Worker(first + k, speed, hoard) for k, speed in enumerate(speeds)]


@pytest.mark.parametrize("hoard", [1, 5])
def test_two_are_killed_one_joins_and_it_is_resumed_on_three_and_on_seven(hoard: int) -> None:
    """100,000 samples, four workers of speeds 1 to 5, two epochs."""
    n = 100_000
    cluster = Cluster(Job(n, unit=32, epochs=2), workers(1, 2, 3.5, 5, hoard=hoard))
    cluster.run(until_places=20_000).kill(3)
    cluster.run(until_places=45_000).kill(0)
    cluster.run(until_places=60_000).join(Worker(4, 4.0, hoard))
    cluster.run(until_places=80_000)
    cluster = cluster.resume(workers(1, 3, 5, hoard=hoard)).run(until_places=n + 30_000)
    cluster = cluster.resume(workers(*range(1, 8), hoard=hoard)).run()
    cluster.check()
    assert cluster.model.sum() == 2 * n


# -- any history ----------------------------------------------------------------------------------

FAULTS = ("kill", "join", "join late", "replicate", "replace keeper", "resume", "hoard")


def happen(cluster: Cluster, what: str, dice: random.Random) -> Cluster:
    """One of the things that happen to clusters, where it can."""
    busy, fresh = cluster.busy, max(cluster.workers, default=-1) + 100
    victims = [worker for worker in cluster.workers.values() if len(busy) - (worker in busy) >= 1]
    if what == "kill" and victims:
        cluster.kill(dice.choice(victims).rank)
    elif what == "join":
        cluster.join(Worker(fresh, dice.uniform(1, 5)))
    elif what == "join late" and busy:
        cluster.join(Worker(fresh, dice.uniform(1, 5), at=min(worker.at for worker in busy)))
    elif what == "replicate":
        cluster.replicate()
    elif what == "replace keeper" and busy and cluster.replica_knows_all_passes:
        cluster.replace_keeper()
    elif what == "resume":
        cluster = cluster.resume(workers(*(dice.uniform(1, 5) for _ in range(dice.randint(1, 7)))))
    elif what == "hoard" and busy:
        dice.choice(busy).hoard = dice.randint(1, 6)
    return cluster


jobs = st.builds(Job, n=st.integers(0, 200), unit=st.integers(1, 5), epochs=st.integers(1, 3), most=st.integers(1, 16))


@property_test
@given(jobs, st.lists(st.tuples(st.integers(0, 60), st.sampled_from(FAULTS)), max_size=12), st.integers(0, 10**6))
def test_any_history(job: Job, faults: list[tuple[int, str]], seed: int) -> None:
    history(job, faults, seed)


@property_test
@given(
    st.builds(Job, n=st.integers(0, 60), epochs=st.integers(1, 3), endless=st.just(True), most=st.just(4)),
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(FAULTS)), max_size=8),
    st.integers(0, 10**6),
)
def test_any_history_of_a_stream_whose_end_nobody_knows(job: Job, faults: list[tuple[int, str]], seed: int) -> None:
    history(job, faults, seed)


@property_test
@given(
    st.builds(Job, n=st.integers(0, 60), unit=st.integers(1, 3), epochs=st.integers(1, 3), loaders=st.integers(2, 3)),
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(("kill", "join", "join late", "resume"))), max_size=8),
    st.integers(0, 10**6),
)
def test_any_history_of_several_loaders(job: Job, faults: list[tuple[int, str]], seed: int) -> None:
    history(job, faults, seed)


@property_test
@given(
    st.builds(Job, n=st.integers(0, 60), unit=st.integers(1, 3), epochs=st.just(3), break_after=st.integers(1, 20)),
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(("kill", "join late", "hoard"))), max_size=8),
    st.integers(0, 10**6),
)
def test_any_history_of_a_program_that_leaves_early(job: Job, faults: list[tuple[int, str]], seed: int) -> None:
    history(job, faults, seed)


def history(job: Job, faults: list[tuple[int, str]], seed: int) -> None:
    dice = random.Random(seed)
    cluster = Cluster(job, workers(*(dice.uniform(1, 5) for _ in range(dice.randint(1, 5)))))
    for steps, what in faults:
        for _ in range(steps):
            if cluster.busy:
                cluster.step()
        if not cluster.busy:
            break
        cluster = happen(cluster, what, dice)
    cluster.run().check()


# -- shares of the work ---------------------------------------------------------------------------

SPEEDS = [1.0, 2.0, 3.0, 5.0]


def one_epoch(most: int) -> Cluster:
    """2,500 batches on workers of uneven speeds."""
    cluster = Cluster(Job(20_000, unit=8, most=most), workers(*SPEEDS)).run()
    cluster.check()
    return cluster


def spread(cluster: Cluster) -> float:
    """Seconds between the ends of the first and the last worker."""
    return max(cluster.ended.values()) - min(cluster.ended.values())


def test_leases_of_one_size_would_leave_the_slow_worker_behind() -> None:
    """The same cluster with a ledger that never shrinks a lease: the others wait for most of a lease."""

    class Fixed(Speeds):
        def fair_units(self, worker: int, question: Question, units: int, now: float) -> int:
            return question.most

    ledger = Ledger()
    ledger.speeds = Fixed()
    fixed = Cluster(Job(20_000, unit=8, most=400), workers(*SPEEDS), ledger).run()
    fixed.check()
    assert spread(fixed) > 10 * spread(one_epoch(400))

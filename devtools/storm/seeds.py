# SPDX-License-Identifier: Apache-2.0
"""Runs seeds of storms, in several processes, and makes failures smaller."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import multiprocessing.queues
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import count

from devtools.storm import faults
from devtools.storm.control import ControlStorm
from devtools.storm.elastic import ElasticStorm, Outcome, StormSettings
from devtools.storm.flight import TapeStorm
from devtools.storm.leaving import LeavingStorm
from devtools.storm.run_steps import RUN_STEP_KINDS
from devtools.storm.server import ServerStorm
from devtools.storm.steps import STEP_KINDS, StepsStorm
from devtools.storm.training import TrainingStorm

KINDS: dict[str, type[ElasticStorm] | type[ServerStorm] | type[StepsStorm]] = {
    "control": ControlStorm,
    "run": TrainingStorm,
    "leaving": LeavingStorm,
    "server": ServerStorm,
    "steps": StepsStorm,
    "tape": TapeStorm,
}
"""What storms are over: the control plane and its ledger; whole elastic runs with models, also where workers leave in
order; asynchronous runs; lockstep runs that resume from steps; a recorded run."""
FAULTS = {
    "control": faults.KINDS,
    "run": RUN_STEP_KINDS,
    "leaving": RUN_STEP_KINDS,
    "server": faults.SERVER_KINDS,
    "steps": STEP_KINDS,
}
"""Which faults there are, by what a storm is over."""
WORKERS = {"control": (2, 4), "run": (2, 4), "leaving": (2, 4), "server": (2, 8), "steps": (2, 4)}
"""With how many a run begins, if nothing else is asked for."""
CHUNK_S = 2.0
"""Seconds after which a process reports."""


def storm(seed: int, settings: StormSettings = StormSettings(), without: Collection[int] = ()) -> Outcome:
    """Run one seed.

    Args:
        seed: decides everything.
        settings: what it is over.
        without: numbers of faults that are left out.
    """
    return KINDS[settings.kind](seed, settings, without).run()


@dataclass(frozen=True)
class Shrunk:
    """A failure with as few faults and workers as possible.

    Attributes:
        outcome: of it.
        without: numbers of the faults that it does not need.
        fewer: workers that it does not need at the beginning.
    """

    outcome: Outcome
    without: tuple[int, ...]
    fewer: int


def shrunk(outcome: Outcome, settings: StormSettings) -> Shrunk:
    """Leave out what a failure does not need: first workers, then one fault after the other."""
    found = Shrunk(outcome, (), settings.fewer)
    for fewer in range(settings.fewer + 1, settings.fewer + outcome.workers):
        again = storm(outcome.seed, replace(settings, fewer=fewer))
        if again.problems:
            found = Shrunk(again, (), fewer)
    settings = replace(settings, fewer=found.fewer)
    for number in range(found.outcome.drawn):
        without = (*found.without, number)
        again = storm(outcome.seed, settings, without)
        if again.problems:
            found = Shrunk(again, without, found.fewer)
    return found


@dataclass
class Tally:
    """What many seeds came to.

    Attributes:
        seeds: that were run.
        faults: how many of each kind happened.
        exchanges: that were committed.
        failed: outcomes with problems.
    """

    seeds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    exchanges: int = 0
    failed: list[Outcome] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count these, too."""
        self.seeds += other.seeds
        self.faults += other.faults
        self.exchanges += other.exchanges
        self.failed += other.failed


def _settle(places: multiprocessing.queues.Queue[int]) -> None:
    """Keep this process on one processor: a world's threads take turns, and to wake one on another core takes long."""
    if hasattr(os, "sched_setaffinity"):
        own = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {own[places.get() % len(own)]})


def chunk(first: int, most: int, settings: StormSettings) -> tuple[int, Tally]:
    """Run seeds from `first` for CHUNK_S, at most so many; the next one, and what came of them."""
    logging.disable(logging.CRITICAL)  # what a faulty network makes the parts warn of
    if not gc.get_freeze_count():  # else each world's end looks through all that was imported
        gc.collect()
        gc.freeze()
    tally, until = Tally(), time.monotonic() + CHUNK_S
    seed = first
    while seed < first + most and (seed == first or time.monotonic() < until):
        outcome = storm(seed, settings)
        tally.add(Tally(1, outcome.faults, outcome.exchanges, [outcome] if outcome.problems else []))
        seed += 1
    return seed, tally


def storms(seeds: range, settings: StormSettings, jobs: int, seconds: float, told: Callable[[Tally], None]) -> Tally:
    """Run seeds in several processes, until all are run or the time is over.

    Args:
        seeds: from the first to the last.
        settings: of all.
        jobs: processes.
        seconds: after which no more are begun.
        told: gets what a process reports.
    """
    total, until = Tally(), time.monotonic() + seconds
    size = 50
    starts: Iterator[int] = (first for first in count(seeds.start, size))
    waiting: dict[Future[tuple[int, Tally]], int] = {}
    spawn = multiprocessing.get_context("spawn")
    places = spawn.Queue()
    for number in range(jobs):
        places.put(number)
    with ProcessPoolExecutor(jobs, spawn, _settle, (places,)) as pool:

        def begin(first: int, end: int) -> None:
            if first < end and time.monotonic() < until:
                waiting[pool.submit(chunk, first, end - first, settings)] = end

        while True:
            while len(waiting) < jobs and time.monotonic() < until:
                first = next(starts)
                if first >= seeds.stop:
                    break
                begin(first, min(first + size, seeds.stop))
            if not waiting:
                return total
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for one in done:
                end = waiting.pop(one)
                following, tally = one.result()
                total.add(tally)
                told(tally)
                begin(following, end)

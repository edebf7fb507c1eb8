# SPDX-License-Identifier: Apache-2.0
"""A storm over the control plane and its ledger. Training, and the ring among the members, are simulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

from devtools.storm.elastic import STORM_S, TIMEOUT_S, ElasticStorm, StormSettings
from devtools.storm.liar import lying_program
from devtools.storm.meeting import Meetings
from devtools.storm.member import Job, Truth, program

from paceline.errors import PacelineError

LIARS = 0.3
"""Share of the seeds in which a member lies."""
SENSELESS = ("makes no sense", "is wrong, and goes on")
"""What the control plane says of a member that it puts out for what that has said."""
SHOWN = 3
"""Samples that a message names."""


class ControlStorm(ElasticStorm):
    """Members with models that are counters; in some seeds one more comes that lies."""

    def __init__(self, seed: int, settings: StormSettings, without: Collection[int] = ()) -> None:
        super().__init__(seed, settings, without)
        rng = random.Random(f"liars of {seed}")  # of its own, so that other faults stay as they were
        self.liars = rng.random() < LIARS and not settings.faults and settings.played is None
        if self.liars:
            self.faults.also("liar", STORM_S * rng.random(), self._lie)

    def _lie(self) -> str:
        return "a member that lies" if self.join(self._liar) else ""

    def _liar(self, done: Callable[[BaseException | None], None]) -> Callable[[], None]:
        def told(error: BaseException | None) -> None:
            if error is None or not isinstance(error, PacelineError):  # else it was put out, or told that it is wrong
                done(error)

        return lying_program(self.job, told)

    def _told(self, kind: str, about: dict[str, Any]) -> None:
        super()._told(kind, about)
        older = self.faults.counts["full_disk"]  # then what is true may make no sense to an older record
        if kind == "lost" and not (self.liars or older) and any(one in about["why"] for one in SENSELESS):
            self.problems.append(f"worker {about['worker']} does not lie, and was put out: {about['why']}")

    def prepare(self) -> None:
        rng = self.world.rng
        self.truth = Truth()
        samples, epochs = rng.randint(8, 30), rng.choice([1, 1, 2])
        self.job = Job(self.world, self.place, samples, epochs, TIMEOUT_S, Meetings(self.world), self.truth)

    def program(self, done: Callable[[BaseException | None], None]) -> Callable[[], None]:
        return program(self.job, done)

    def check(self) -> None:
        self.exchanges = max([number for _, number in self.truth.models], default=0)
        full = bool(self.faults.counts["full_disk"])  # then the record may be older than members, who are given up
        self.problems += self.truth.forks(full)
        if not full:
            self.problems += self.truth.forgotten
        own = self.truth.of_liars
        places = [(epoch, place) for epoch in range(self.job.epochs) for place in range(self.job.samples)]
        every = [one for one in places if one not in own]
        for worker, model in self.truth.ended.items():
            lost = [one for one in every if model[one] == 0]
            more = [one for one in model if model[one] > 1 and one not in own]
            for what, which in (("lost", lost), ("repeated", more)):
                if which:
                    shown = ", ".join(f"sample {place} of epoch {epoch}" for epoch, place in which[:SHOWN])
                    more_than = ", .." if len(which) > SHOWN else ""
                    self.problems.append(f"worker {worker} ends with {len(which)} {what}: {shown}{more_than}")

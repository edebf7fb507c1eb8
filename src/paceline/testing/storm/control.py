# SPDX-License-Identifier: Apache-2.0
"""A storm over the control plane and its ledger. Training, and the ring among the members, are simulated."""

from __future__ import annotations

from collections.abc import Callable

from paceline.testing.storm.elastic import TIMEOUT_S, ElasticStorm
from paceline.testing.storm.meeting import Meetings
from paceline.testing.storm.member import Job, Truth, program


class ControlStorm(ElasticStorm):
    """Members with models that are counters."""

    def prepare(self) -> None:
        rng = self.world.rng
        self.truth = Truth(problems=self.problems)
        samples, epochs = rng.randint(8, 30), rng.choice([1, 1, 2])
        self.job = Job(self.world, self.place, samples, epochs, TIMEOUT_S, Meetings(self.world), self.truth)

    def program(self, done: Callable[[BaseException | None], None]) -> Callable[[], None]:
        return program(self.job, done)

    def check(self) -> None:
        self.exchanges = max([number for _, number in self.truth.models], default=0)
        if not self.faults.counts["full_disk"]:  # else the record may be older than the members, who then begin anew
            self.problems += self.truth.forgotten
        every = [(epoch, place) for epoch in range(self.job.epochs) for place in range(self.job.samples)]
        for worker, model in self.truth.ended.items():
            lost = [one for one in every if model[one] == 0]
            more = [one for one in model if model[one] > 1]
            if lost or more:
                self.problems.append(f"worker {worker} ends with {lost} lost and {more} repeated")

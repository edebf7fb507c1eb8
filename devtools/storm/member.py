# SPDX-License-Identifier: Apache-2.0
"""A worker of a simulated elastic run: the real client of the control plane, and a model that counts samples.

The model has, for each sample, how often it is in it: training on a sample adds one. So it says itself, and not the
ledger, what was lost or repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from devtools.storm.meeting import Meetings, Model
from devtools.world.process import Process, World

from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.errors import PacelineError, PeerLostError
from paceline.flow.control.client import ControlClient
from paceline.flow.control.messages import About, Generation

STEP_S = (0.01, 0.6)
"""Seconds of training on a lease."""
KEPT = 3
"""Exchanges whose models are compared: no member is further behind."""


@dataclass
class Truth:
    """What has really happened.

    Attributes:
        models: by lineage (the label of the generation that began from nothing) and exchange, the model of the first
            member that applied it.
        forgotten: beginnings from nothing after a commit, of which the control plane does not know.
        forked: (first, worker, what): two made one exchange differently, which they may if a full disk has kept the
            record from what the first was told, and if not both come to the end.
        ended: workers that came to the end of their program, with their models.
        of_liars: places that were leased to a member that lies: it may say of them what it likes.
    """

    models: dict[tuple[str, int], tuple[int, Model]] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)
    forked: list[tuple[int, int, str]] = field(default_factory=list)
    ended: dict[int, Model] = field(default_factory=dict)
    of_liars: set[tuple[int, int]] = field(default_factory=set)

    def begun(self, generation: Generation) -> None:
        """A member begins from nothing."""
        before = {lineage for lineage, _ in self.models if lineage != generation.label}
        if before and not generation.restored:
            self.forgotten.append(f"{generation.label} begins anew after commits in {sorted(before)}")

    def applied(self, lineage: str, exchange: int, worker: int, model: Model) -> None:
        """A member has applied a committed exchange."""
        first, known = self.models.setdefault((lineage, exchange), (worker, Model(model)))
        self.models.pop((lineage, exchange - KEPT), None)
        if known != model:
            differ = {one: (known[one], model[one]) for one in known | model if known[one] != model[one]}
            self.forked.append((first, worker, f"differ after exchange {exchange}: {differ}"))
            self.models[lineage, exchange] = (worker, Model(model))

    def forks(self, full: bool) -> list[str]:
        """What is wrong with the exchanges that were made twice; `full`: the disk of the record was full."""
        wrong = [one for one in self.forked if not full or self.ended.keys() >= {one[0], one[1]}]
        return [f"workers {first} and {worker} {what}" for first, worker, what in wrong]


@dataclass(frozen=True)
class Job:
    """What all workers of a run are given.

    Attributes:
        world: of the run.
        address, port: of the control plane.
        samples: of the data.
        epochs: passes over the data.
        timeout_s: of every wait.
        meetings: the exchanges.
        truth: what the checks read.
    """

    world: World
    place: tuple[str, int]
    samples: int
    epochs: int
    timeout_s: float
    meetings: Meetings
    truth: Truth


class Member:
    """One worker's program.

    Args:
        job: of all workers.
        at: called before it comes to an exchange, as (this member, "starts", exchange), and before it reports one
            complete ("commits").
    """

    def __init__(self, job: Job, at: Callable[[Member, str, int], None] = lambda member, act, exchange: None) -> None:
        self.job, self._at = job, at
        process = job.world.current.owner
        assert isinstance(process, Process)
        machine = process.machine
        about = About(machine.name, machine.address, process.number, {"rule": "storm"})
        self.client = ControlClient(*job.place, about, None, job.timeout_s)
        self.process = process
        self.model, self.lineage = Model(), ""
        self.held: list[Mark] = []
        self.generation = Generation()

    def run(self) -> None:
        """Train all epochs, and say goodbye."""
        job, client = self.job, self.client
        client.on_change(lambda new: job.meetings.cancel(new.number - 1, client.worker, "the members have changed"))
        client.on_end(lambda why: job.meetings.cancel(1 << 60, client.worker, why))
        self._adopt(client.enter())
        for epoch in range(job.epochs):
            while not self._over(epoch):
                self._exchange()
        job.truth.ended[client.worker] = self.model
        client.leave()

    def _over(self, epoch: int) -> bool:
        """Train on a lease if there is one; whether the epoch is over for all."""
        client = self.client
        if self.held or client.called > self.generation.exchange:
            return False
        kind, mark = client.ask(Question(0, epoch, self.job.samples, 1, 3, dry=True))
        if kind == "over":
            return True
        if mark is not None:
            low, high = STEP_S
            runtime.sleep(low + (high - low) * self.job.world.rng.random())
            self.held.append(mark)
        elif client.called <= self.generation.exchange:
            client.wait_news(self.job.timeout_s)
            return self._over(epoch)
        return False

    def _exchange(self) -> None:
        """Make the next exchange, among whatever members there are, until it is committed."""
        client, job = self.client, self.job
        while True:
            generation = self.generation
            number = generation.exchange + 1
            try:
                self._at(self, "starts", number)
                client.starts(number)
                own = Model((epoch, place) for _, epoch, begin, end in self.held for place in range(begin, end))
                total = job.meetings.exchange(generation, number, client.worker, own, job.timeout_s)
            except PeerLostError as error:
                client.check()
                blamed = job.meetings.suspects(generation, number, client.worker)
                self._adopt(client.failed(generation.number, str(error), blamed))
                continue
            self._at(self, "commits", number)
            made = {"minibatches": sum(end - begin for *_, begin, end in self.held)}
            verdict = client.commit(generation.number, number, list(self.held), made)
            if verdict.committed:
                self.model = self.model + total
                self.held = []
                job.truth.applied(self.lineage, number, client.worker, self.model)
                self._share()
            self._adopt(verdict.generation)
            if verdict.committed:
                return

    def _adopt(self, generation: Generation) -> None:
        """Take over a generation, and its state if this worker has not got it."""
        client, job = self.client, self.job
        while True:
            if client.worker not in generation.workers:
                client.check()
                raise PeerLostError(f"worker {client.worker} is no member of generation {generation.number}")
            self.generation = generation
            if generation.donor is None:
                if generation.restored or client.worker in generation.newcomers:
                    self.model, self.held, self.lineage = Model(), [], generation.label
                    job.truth.begun(generation)
                    if self._outdated(generation):
                        generation = client.generation
                        continue
            elif client.worker in generation.newcomers:
                newer = self._fetch(generation)
                if newer is not None or self._outdated(generation):
                    generation = newer or client.generation
                    continue
            self._share()
            return

    def _outdated(self, generation: Generation) -> bool:
        """Report that this worker holds the state; whether there are newer members that do not know of it."""
        client = self.client
        client.holds_state(generation.number)
        client.ledger()  # its answer follows all earlier messages
        return client.generation.number > generation.number and client.worker in client.generation.newcomers

    def _share(self) -> None:
        state = Model(self.model), self.lineage
        self.job.meetings.states[self.client.worker] = (self.process, self.generation.label, state)

    def _fetch(self, generation: Generation) -> Generation | None:
        """Get the donor's state; a newer generation if that is not possible."""
        client, job = self.client, self.job
        assert generation.donor is not None
        until = runtime.monotonic() + job.timeout_s
        while runtime.monotonic() < until:
            donor, label, state = job.meetings.states.get(generation.donor, (None, "", None))
            if donor is None or donor.dead:
                break
            if label == generation.label:
                assert state is not None
                self.model, self.lineage, self.held = Model(state[0]), state[1], []
                return None
            if client.generation.number > generation.number:
                return client.generation
            client.check()
            runtime.sleep(0.01)
        return client.failed(generation.number, "the donor sends no state", [generation.donor])


def program(
    job: Job, done: Callable[[BaseException | None], None], member: Callable[[Job], Member] = Member
) -> Callable[[], None]:
    """The program of a worker's process; `done` gets why it ended."""

    def main() -> None:
        try:
            member(job).run()
        except PacelineError as error:
            done(error)
            raise
        done(None)

    return main

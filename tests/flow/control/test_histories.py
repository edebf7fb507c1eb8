# SPDX-License-Identifier: Apache-2.0
"""Histories of the state machine: verdicts agree, no place is lost or counted twice, and nothing gets stuck."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.flow.control.messages import Terms
from tests.flow.control.model import Run, Worker, act, beat, come_back

MOST = 5
TIMEOUT = 20.0
pick = st.integers(0, 1 << 16)


class Histories(RuleBasedStateMachine):
    """All that can happen, in any order."""

    first = 0

    @initialize(least=st.integers(1, 2), grace=st.sampled_from([None, 1.0]), expected=st.integers(0, 3))
    def begin(self, least: int, grace: float | None, expected: int) -> None:
        self.run = Run(Terms(least, 64, TIMEOUT, grace, 1.0, expected, quorum_s=1e9), self.first)
        for _ in range(max(least, expected)):
            self.run.join()

    def some(self, number: int, **have: Any) -> Worker | None:
        found = [
            one for one in self.run.workers.values() if all(getattr(one, name) == value for name, value in have.items())
        ]
        return found[number % len(found)] if found else None

    @rule()
    @precondition(lambda self: len(self.run.workers) < MOST and not self.run.machine.finished)
    def join(self) -> None:
        self.run.join()

    @rule(number=pick)
    def deliver(self, number: int) -> None:
        waiting = [one for one in self.run.workers.values() if one.inbox and not one.frozen]
        if waiting:
            self.run.deliver(waiting[number % len(waiting)])

    @rule()
    def deliver_everything(self) -> None:
        for one in list(self.run.workers.values()):
            if not one.frozen:
                self.run.deliver_all(one)

    @rule(number=pick, dry=st.booleans())
    def ask(self, number: int, dry: bool) -> None:
        one = self.some(number, trains=True)
        if one is not None:
            self.run.ask(one, dry)

    @rule(number=pick)
    def leave_early(self, number: int) -> None:
        one = self.some(number, trains=True)
        if one is not None and number % 4 == 0:
            self.run.leave_early(one)

    @rule(number=pick)
    def sync(self, number: int) -> None:
        one = self.some(number, state=-1, away=False, frozen=False)
        if one is not None and one.generation.number and one.pending is None:
            donor = one.generation.donor
            if donor is None or (donor in self.run.workers and not self.run.workers[donor].frozen):
                self.run.sync(one)

    @rule(number=pick)
    def enter(self, number: int) -> None:
        one = self.some(number, trains=True)
        if one is not None:
            self.run.enter(one)

    @rule(number=pick)
    def commit(self, number: int) -> None:
        one = self.some(number, ready=True, trains=False)
        if one is not None and self.run.exchanged(one):
            self.run.commit(one)

    @rule(rounds=st.integers(1, 6))
    def everybody_goes_on(self, rounds: int) -> None:
        """A while in which nothing goes wrong."""
        for _ in range(rounds):
            self.deliver_everything()
            for one in list(self.run.workers.values()):
                if one.away and not one.frozen:
                    come_back(self.run, one)
                act(self.run, one)

    @rule(number=pick, suspect=pick)
    def fail(self, number: int, suspect: int) -> None:
        one = self.some(number, ready=True, trains=False)
        if one is not None:
            members = one.generation.workers
            self.run.fail(one, [members[suspect % len(members)]])

    @rule(number=pick)
    def die(self, number: int) -> None:
        one = self.some(number)
        if one is not None:
            self.run.die(one)

    @rule(number=pick)
    def freeze(self, number: int) -> None:
        one = self.some(number)
        if one is not None and number % 2:
            one.frozen = True

    @rule(number=pick)
    def thaw(self, number: int) -> None:
        one = self.some(number, frozen=True)
        if one is not None:
            one.frozen = False

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.5]))
    def wait(self, seconds: float) -> None:
        self.run.now += seconds
        for one in list(self.run.workers.values()):
            if not (one.frozen or one.away) and one.number in self.run.workers:
                self.run.do(beat, self.run, one)
        self.run.do(lambda now: self.run.machine.tick(now))

    @rule()
    def restart(self) -> None:
        self.run.restart()

    @rule()
    def restart_before_it_speaks(self) -> None:
        """The next thing that happens is in the record, but nobody hears of it."""
        self.run.crash_next = True

    @rule(number=pick)
    def back(self, number: int) -> None:
        one = self.some(number, away=True, frozen=False)
        if one is not None:
            come_back(self.run, one)

    @invariant()
    def members_live(self) -> None:
        if hasattr(self, "run"):
            assert self.run.machine.exchange >= max((one.state for one in self.run.workers.values()), default=0)

    def teardown(self) -> None:
        """From wherever things stand: when all answer, exchanges are committed and the epoch comes to its end."""
        run = self.run
        run.crash_next = False
        for one in list(run.workers.values()):
            if one.frozen:
                run.die(one)
        before, epochs = run.machine.exchange, {one.number: one.epoch for one in run.workers.values()}
        for _ in range(400):
            while len(run.workers) < run.terms.min_workers:
                run.join()
            for one in list(run.workers.values()):
                if one.away:
                    come_back(run, one)
            for one in list(run.workers.values()):
                act(run, one)
            self.wait(0.2)
            self.deliver_everything()
            held = {one.worker for one in run.machine.workers.values() if one.held}
            at_work = [one for one in run.workers.values() if one.number not in held]
            further = all(one.epoch > epochs.get(one.number, 0) for one in at_work)
            if run.workers and run.machine.exchange > before and further:
                return
        raise AssertionError(f"stuck: {run.machine.status(run.now)} {run.workers}")


class GrowingHistories(Histories):
    """The same with a number of members that grows: no generation has more than are wanted."""

    first = 2


TestHistories = Histories.TestCase
TestGrowingHistories = GrowingHistories.TestCase
TestHistories.settings = TestGrowingHistories.settings = settings(
    max_examples=30,
    stateful_step_count=50,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking takes minutes: add Phase.shrink to look into one
    suppress_health_check=list(HealthCheck),
)

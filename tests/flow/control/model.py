# SPDX-License-Identifier: Apache-2.0
"""A tiny elastic run around the state machine: workers exchange sets of places, and the server can crash anywhere.

What the state machine says arrives later, one by one; what workers say arrives at once. A worker's model is the list of
the places whose work is in it, so that a place that is lost or counted twice shows.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.flow.control import recovery
from paceline.flow.control.client import HeldLeases
from paceline.flow.control.ledger import OVER, WORK
from paceline.flow.control.members import Commit, ControlMessage, RollCall
from paceline.flow.control.messages import About, Generation, Terms
from paceline.flow.control.state_machine import StateMachine

PLACES = 24
Place = tuple[int, int]
"""(epoch, place)"""


@dataclass
class Worker:
    """One worker, as it sees things."""

    number: int
    secret: str
    inbox: deque[ControlMessage] = field(default_factory=deque)
    generation: Generation = field(default_factory=Generation)
    state: int = -1
    model: Counter[Place] = field(default_factory=Counter)
    held: HeldLeases = field(default_factory=HeldLeases)
    epoch: int = 0
    serial: int = 0
    pending: tuple[Any, ...] | None = None
    entered: tuple[int, int] = (0, 0)
    started: int = 0
    frozen: bool = False
    away: bool = False
    called: int = 0

    @property
    def ready(self) -> bool:
        """A member that holds the state, and waits for nothing."""
        return not (self.pending or self.frozen or self.away) and self.state >= 0 and self.generation.number > 0

    @property
    def trains(self) -> bool:
        """It has not come to the next exchange."""
        return self.ready and self.entered != (self.generation.number, self.generation.exchange + 1)


class Run:
    """The workers, the state machine, and its record."""

    def __init__(self, terms: Terms, first: int = 0) -> None:
        self.terms = terms
        self.first = first  # members that are wanted at the start, and twice as many after every third exchange
        self.now = 0.0
        self.workers: dict[int, Worker] = {}
        self.machine = StateMachine(terms)
        self.record = ""
        self.put_in: dict[tuple[int, int], dict[int, list[Mark]]] = {}  # (generation, exchange) -> what went in
        self.sent: dict[tuple[int, int], set[int]] = {}
        self.verdicts: dict[tuple[int, int], bool] = {}
        self.epochs: dict[int, set[int]] = {}
        self.crash_next = False
        self.spoils: set[tuple[int, int]] = set()  # (exchange, worker) whose work is left out of it, each place once
        self.spoilt: dict[tuple[int, int, int], set[Place]] = {}  # (generation, exchange, worker) -> places
        self.points, self.crash_at, self.arrives = 0, [0], False  # records and sends so far; those before which it dies
        self.generations: dict[int, Generation] = {}

    # -- the server -------------------------------------------------------------------------------

    def do(self, call: Callable[..., Any], *args: Any) -> Any:
        """Something happens at the server: the record is written, then what is said is on its way."""
        before, generation = self.machine.exchange, self.machine.generation
        result = call(*args, self.now)
        self.look_at_sets()
        if self.machine.exchange != before:
            assert self.machine.exchange == before + 1
            sent = self.sent.get((generation.number, before + 1), set())
            assert sent >= set(generation.workers), "a commit of which somebody did not know"
        if self.machine.dirty:
            if self.dies_here():
                return result
            self.machine.dirty = False
            self.record = json.dumps(recovery.state(self.machine))
        said = self.machine.outbox.take()
        if self.crash_next:
            self.crash_next = False
            self.restart()
            return result
        for one in said:
            if self.dies_here():
                return result
            if one.kind == "generation" and one.worker is not None:
                self.look_at(Generation.read(json.loads(json.dumps(one.note))))
            if one.worker in self.workers:
                self.workers[one.worker].inbox.append(one)
        return result

    def dies_here(self) -> bool:
        """Before the next record is written, or the next word sent; `arrives`: what was sent before."""
        self.points += 1
        if self.points not in self.crash_at:
            return False
        for one in list(self.workers.values()):
            if self.arrives:
                self.deliver_all(one)
        self.restart()
        return True

    def look_at_sets(self) -> None:
        """The sets that are changed one by one are those of the records."""
        machine, afresh, single = self.machine, RollCall(), RollCall()
        afresh.begin(machine.members, machine.exchange + 1)
        single.begin((), machine.exchange + 1)
        for one in machine.members:
            single.note(one)
        assert machine.roll.sets() == afresh.sets() == single.sets()
        assert machine.absent == {one.worker for one in machine.workers.values() if one.absent is not None}

    def look_at(self, generation: Generation) -> None:
        """What must be true of every generation."""
        known = self.generations.setdefault(generation.number, generation)
        assert known.workers == generation.workers == sorted(generation.workers)
        assert len(generation.workers) >= (1 if self.machine.finished else self.terms.min_workers)
        assert generation.newcomers <= set(generation.workers)
        if generation.donor is None:
            assert generation.newcomers == set(generation.workers)
        else:
            assert generation.donor in generation.workers and generation.donor not in generation.newcomers
        assert generation.restored == (generation.exchange > 0 and generation.donor is None)
        assert not self.first or len(generation.workers) <= generation.wanted
        assert generation.wanted <= max(self.wanted_after(generation.exchange), self.terms.min_workers)

    def wanted_after(self, exchange: int) -> int:
        """The members that are wanted after so many exchanges."""
        return self.first << exchange // 3

    def restart(self) -> None:
        """The server dies and is started again from its record; what was on its way is lost."""
        self.machine = StateMachine(self.terms)
        if self.record:
            recovery.load(self.machine, json.loads(self.record), self.now)
        for one in list(self.workers.values()):
            one.inbox.clear()
            one.away = True
        self.do(lambda now: None)

    # -- workers ----------------------------------------------------------------------------------

    def join(self) -> None:
        """A new worker."""
        record = self.machine.join(About("host", "127.0.0.1", 1, {"rule": "block"}, self.first), self.now)
        self.workers[record.worker] = Worker(record.worker, record.secret)
        self.do(lambda now: None)

    def die(self, one: Worker) -> None:
        """SIGKILL: its connection closes."""
        del self.workers[one.number]
        if not one.away:
            self.do(self.machine.lost, [one.number], "its connection closed")

    def back(self, one: Worker) -> None:
        """It finds the new server, and says again what was not answered."""
        one.away = False
        record = recovery.known(self.machine, one.number, one.secret)
        said = recovery.MemberState(one.state, one.started, one.generation.number)
        self.do(recovery.back, self.machine, record, said, one.held.marks())
        if one.away or one.number not in self.workers:
            return
        if one.started:
            self.do(self.machine.starts, one.number, min(one.started, self.machine.exchange + 1))
        if 0 <= one.state == one.generation.exchange and not one.away:
            self.do(self.machine.holds_state, one.number, one.generation.number, 0)
        if one.pending is not None and not one.away:
            self.send(one, *one.pending)

    def send(self, one: Worker, kind: str, *args: Any) -> None:
        """A request, which is said again to a new server."""
        one.pending = (kind, *args)
        self.do(getattr(self.machine, kind), one.number, *args)

    def next(self, one: Worker) -> int:
        """A serial number."""
        one.serial += 1
        return one.serial

    def ask(self, one: Worker, dry: bool) -> None:
        """For work, of the epoch in which it is."""
        one.started = min(one.started, one.generation.exchange)
        self.send(one, "ask", self.next(one), Question(0, one.epoch, PLACES, 2, 4, dry))

    def leave_early(self, one: Worker) -> None:
        """It ends its pass, and gives back what it holds."""
        marks = one.held.marks()
        one.held.settle(marks)
        self.send(one, "tell", self.next(one), "left", [0, one.epoch, [list(mark) for mark in marks]])

    def enter(self, one: Worker) -> None:
        """It comes to the exchange, with what it holds."""
        key = (one.generation.number, one.generation.exchange + 1)
        one.entered, one.started = key, key[1]
        self.put_in.setdefault(key, {})[one.number] = one.held.marks()
        self.do(self.machine.starts, one.number, key[1])

    def exchanged(self, one: Worker) -> bool:
        """Whether all members have put in what they have."""
        return set(self.put_in.get(one.entered, {})) >= set(one.generation.workers)

    def commit(self, one: Worker) -> None:
        """It is through the exchange."""
        self.sent.setdefault(one.entered, set()).add(one.number)
        marks = self.put_in[one.entered][one.number]
        spoilt = self.spoil(one, marks)
        wanted = self.wanted_after(one.entered[1])
        said = Commit(self.next(one), [] if spoilt else marks, {}, marks if spoilt else [], wanted)
        one.pending = ("commit", *one.entered, said)
        self.do(lambda now: self.machine.commit(one.number, *one.entered, said, now))

    def spoil(self, one: Worker, marks: list[Mark]) -> bool:
        """Whether its work is left out of the exchange."""
        key = (*one.entered, one.number)
        places = {(epoch, place) for _, epoch, begin, end in marks for place in range(begin, end)}
        before = set().union(*(found for other, found in self.spoilt.items() if other[1:] != key[1:]))
        if (key[1], one.number) in self.spoils and not places & before:
            self.spoilt[key] = places
        return key in self.spoilt

    def fail(self, one: Worker, suspects: list[int]) -> None:
        """The exchange failed at this one."""
        self.send(one, "failed", self.next(one), one.generation.number, "reset by peer", suspects)

    def sync(self, one: Worker) -> None:
        """A newcomer gets the state."""
        generation = one.generation
        if generation.donor is None:
            one.model = Counter()
        else:
            donor = self.workers[generation.donor]
            self.deliver_all(donor)
            if donor.generation.number != generation.number or one.generation.number != generation.number:
                return
            assert donor.state == generation.exchange
            one.model = Counter(donor.model)
        one.state = generation.exchange
        self.do(self.machine.holds_state, one.number, generation.number, len(self.verdicts))

    # -- what arrives -----------------------------------------------------------------------------

    def deliver_all(self, one: Worker) -> None:
        """Everything that is on its way to it."""
        while one.inbox and one.number in self.workers:
            self.deliver(one)

    def deliver(self, one: Worker) -> None:
        """The next thing that was said to it."""
        said = one.inbox.popleft()
        if said.kind == "given_up":
            self.workers.pop(one.number, None)
        elif said.kind == "generation":
            self.learn(one, Generation.read(said.note))
        elif said.kind == "called":
            one.called = max(one.called, said.numbers[0])
        elif one.pending is None or said.serial != self.serial_of(one.pending):
            return
        elif said.kind == "verdict":
            new = one.generation.committed(*said.numbers[1:]) if said.note is None else Generation.read(said.note)
            self.judged(one, bool(said.numbers[0]), new)
        elif said.kind == "newer":
            assert Generation.read(said.note).number > one.pending[2]
            self.learn(one, Generation.read(said.note))
            one.pending = None
        elif said.kind == "answer":
            one.pending = None
            self.answered(one, *said.numbers)
        elif said.kind == "ack":
            one.pending = None
        else:
            raise AssertionError(said)

    @staticmethod
    def serial_of(pending: tuple[Any, ...]) -> int:
        """Of a request."""
        return int(pending[3].serial if pending[0] == "commit" else pending[1])

    def learn(self, one: Worker, generation: Generation) -> None:
        """A newer generation."""
        if (generation.number, generation.exchange) > (one.generation.number, one.generation.exchange):
            one.generation = generation
            if one.number in generation.newcomers:
                one.state = -1
                if generation.restored:
                    one.held.clear()

    def judged(self, one: Worker, committed: bool, generation: Generation) -> None:
        """A verdict: the same for all."""
        assert one.pending is not None
        key = (one.pending[1], one.pending[2])
        assert self.verdicts.setdefault(key, committed) == committed, f"two verdicts on {key}"
        one.pending = None
        if committed:
            one.state = key[1]
            merged = [one for one in self.generations[key[0]].workers if (*key, one) not in self.spoilt]
            for marks in (self.put_in[key][member] for member in merged):
                one.model.update((epoch, place) for _, epoch, begin, end in marks for place in range(begin, end))
            one.held.settle(self.put_in[key][one.number])
            assert max(one.model.values(), default=1) == 1, "a place was counted twice"
        self.learn(one, generation)

    def answered(self, one: Worker, kind: int, *mark: int) -> None:
        """Work, or none."""
        if kind == WORK:
            loader, epoch, begin, end = mark
            assert all(one.model[epoch, place] == 0 for place in range(begin, end)), "work that was done already"
            for other in self.workers.values():
                settled = other.pending is None and not other.inbox and other.number in self.machine.workers
                assert other is one or not settled or not overlap(other.held, epoch, begin, end), "another has it"
            one.held.add((loader, epoch, begin, end))
        elif kind == OVER:
            done = {place for epoch, place in one.model if epoch == one.epoch}
            assert done == set(range(PLACES)), "an epoch was over before all of it was done"
            one.epoch += 1


def overlap(held: HeldLeases, epoch: int, begin: int, end: int) -> bool:
    """Whether a place of these is held."""
    return any(one == epoch and low < end and begin < high for _, one, low, high in held.marks())


def beat(run: Run, one: Worker, now: float) -> None:
    """A heartbeat."""
    run.machine.sign_of_life(one.number, now)


def come_back(run: Run, one: Worker) -> None:
    """To a new server."""
    try:
        run.back(one)
    except ValueError:
        raise
    except RuntimeError:  # it was given up meanwhile, or its hello is in no record
        run.workers.pop(one.number, None)
        if not one.generation.number and not run.machine.finished:
            run.join()


def act(run: Run, one: Worker) -> None:
    """What a worker does next that has nothing in its way."""
    if one.number not in run.workers or one.pending or one.frozen or one.away or not one.generation.number:
        return
    if one.state < 0:
        donor = one.generation.donor
        if donor is None or donor in run.workers:
            run.sync(one)
    elif one.trains:
        if len(one.held.marks()) < 2 and one.called <= one.generation.exchange:
            run.ask(one, True)
        else:
            run.enter(one)
    elif run.exchanged(one):
        run.commit(one)

# SPDX-License-Identifier: Apache-2.0
"""A storm over an elastic run: first faults, then none, and all must come to the end.

The control plane, its record and its clients are those of real runs. A launcher starts again what has died.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devtools.storm.faults import KINDS, Faults, chosen
from devtools.storm.recorder import TapedControlServer
from devtools.storm.tape import Played
from devtools.world.disk import SimDisk
from devtools.world.process import Process, SimMachine, World
from devtools.world.scheduler import Broken

from paceline.core import runtime
from paceline.errors import CheckpointError, OverError, PacelineError, RuleError, UnsupportedError
from paceline.flow.control.messages import Terms
from paceline.flow.control.server import ControlServer
from paceline.observe.reports.elastic_events import event_text

Program = Callable[[Callable[[BaseException | None], None]], Callable[[], None]]
"""Makes what a worker's process runs, from what gets why it ended."""

PORT = 4000
TIMEOUT_S = 8.0
STORM_S = 6.0
"""Seconds in which faults happen."""
CALM_S = 600.0
"""Seconds after them in which all must come to an end."""
RECORD = Path("/record.json")


@dataclass(frozen=True)
class StormSettings:
    """What a storm is over.

    Attributes:
        kind: "control" (the control plane and its ledger), "run" (whole elastic runs with models) or "server"
            (whole runs under asynchronous rules).
        faults: names of those that may happen; empty for all.
        rule: of whole runs; empty: drawn.
        workers: the fewest with which a run begins, and the most.
        fewer: workers that are drawn for the beginning, and left out.
        played: the recorded run, of kind "tape".
    """

    kind: str = "control"
    faults: tuple[str, ...] = ()
    rule: str = ""
    workers: tuple[int, int] = (2, 4)
    fewer: int = 0
    played: Played | None = None


@dataclass
class Outcome:
    """What a seed came to.

    Attributes:
        seed: of the world.
        problems: what was wrong; empty if nothing was.
        faults: how many of each kind happened.
        drawn: faults that were to happen.
        tape: when and to whom.
        exchanges: that were committed.
        seconds: of the world's time.
        turns: of its threads.
        workers: with which the run began.
    """

    seed: int
    problems: list[str]
    faults: Counter[str]
    drawn: int
    tape: list[tuple[float, str]]
    exchanges: int
    seconds: float
    turns: int
    workers: int = 0


class ElasticStorm(ABC):
    """One world with one elastic run.

    Args:
        seed: decides everything.
        settings: what it is over.
        without: numbers of faults that are left out.

    Attributes:
        limit_s: seconds in which all must come to the end.
        flight: whether the control plane writes a flight tape.
        hosts_disk: that the workers' hosts share; None: each has its own.
        kinds: faults to draw from, by name.
    """

    limit_s = STORM_S + CALM_S
    flight = False
    hosts_disk: SimDisk | None = None
    kinds: Mapping[str, Callable[[Faults], str]] = KINDS

    def __init__(self, seed: int, settings: StormSettings, without: Collection[int] = ()) -> None:
        self.settings = settings
        self.seed, self.world = seed, World(seed)
        self.control_machine = self.world.machine("control")
        self.terms = self.agree()
        self.problems: list[str] = []
        self.place = (self.control_machine.address, PORT)
        self.prepare()
        self.control: Process | None = None
        self.workers: dict[int, Process] = {}
        self.server: ControlServer | None = None
        self.tape: list[tuple[float, str]] = []
        self.exchanges = 0
        self._over = False
        self._wanted, self._started = 0, 0
        self.faults = Faults(self, chosen(self.kinds, settings.faults), without)
        self._start_control()
        self.arrive()

    def agree(self) -> Terms:
        """Draw the terms of the control plane."""
        rng, settings = self.world.rng, self.settings
        least, first = rng.choice([1, 1, 2]), rng.randint(*settings.workers)
        grace, first = rng.choice([None, 0.2]), max(1, first - settings.fewer)
        return Terms(min(least, first), 2 * settings.workers[1], TIMEOUT_S, grace, 1.0, first, quorum_s=1e6)

    def arrive(self) -> None:
        """Let the first workers come, and the faults begin."""
        for _ in range(self.terms.expected):
            self.join()
        self.faults.begin(self.world.rng.randint(1, 8), STORM_S)

    def join(self, program: Program | None = None) -> bool:
        """Start a further worker, if there is room; whether there was."""
        room = self._wanted < self.terms.max_workers
        if room:
            self._wanted += 1
            self._start_worker(self.world.machine(f"host{self._wanted}", self.hosts_disk), program)
        return room

    @abstractmethod
    def prepare(self) -> None:
        """Draw the job."""

    @abstractmethod
    def program(self, done: Callable[[BaseException | None], None]) -> Callable[[], None]:
        """What a worker's process runs; `done` gets why it ended."""

    def ends_the_run(self, error: BaseException | None) -> bool:
        """Whether nobody is started any more after a worker has ended so."""
        # Without a checkpoint a run ends, and says so, when all that held the model are gone.
        return error is None or isinstance(error, (OverError, CheckpointError))

    @abstractmethod
    def check(self) -> None:
        """Add to the problems what is wrong at the end."""

    # -- the launcher -----------------------------------------------------------------------------

    def _start_control(self) -> None:
        if not self._over:
            self.control = self.control_machine.start(self._serve, "control")
            self.control.on_end.append(self._control_ended)

    def _serve(self) -> None:
        address = self.control_machine.address
        server = TapedControlServer if self.flight else ControlServer
        self.server = server(address, PORT, None, self.terms, RECORD, self._told)
        self.server.start()
        while True:
            runtime.sleep(1e6)

    def _told(self, kind: str, about: dict[str, Any]) -> None:
        self.tape.append((self.world.now, event_text(kind, about)))

    def _control_ended(self) -> None:
        error = self.control.error if self.control is not None else None
        self.control = None
        if error is not None:
            self.problems.append(f"the control plane ended: {type(error).__name__}: {error}")
            self._over = isinstance(error, CheckpointError)
        self.world.after(self.restart_s(), self._start_control)

    def restart_s(self) -> float:
        """Draw the seconds until the control plane is started again."""
        return 0.05 + self.world.rng.random()

    def replace(self, machine: SimMachine) -> None:
        """A worker has died: start another one there."""
        self.world.after(0.05 + 0.5 * self.world.rng.random(), lambda: self._start_worker(machine))

    def _start_worker(self, machine: SimMachine, program: Program | None = None) -> None:
        if self._over:
            return
        number = self._started
        self._started += 1

        def ended(error: BaseException | None) -> None:
            if not self._over and self.ends_the_run(error):
                self._over = True
                self.world.after(TIMEOUT_S, self._stop_waiting)
            if isinstance(error, (UnsupportedError, RuleError)):  # it cannot train, whatever happens
                self.problems.append(str(error))
                self._over = True
            self.tape.append(
                (self.world.now, f"worker process {number} ends" + ("" if error is None else f": {error!r}"))
            )

        process = self.workers[number] = machine.start(
            (program or self.program)(ended), f"process {number} on {machine.name}"
        )
        process.on_end.append(lambda: self._worker_ended(number, machine))

    def _worker_ended(self, number: int, machine: SimMachine) -> None:
        process = self.workers.pop(number)
        if process.error is not None and not isinstance(process.error, PacelineError):
            self.problems.append(f"{process.name} ended: {process.error!r}")
        if not self._over:
            self.replace(machine)

    def _stop_waiting(self) -> None:
        """Nobody is started any more: end those that wait below the minimum, as a launcher does."""
        if self.server is not None and self.server._machine.paused:
            for process in list(self.workers.values()):
                process.kill()
        elif self.workers:
            self.world.after(1.0, self._stop_waiting)

    # -- the run ----------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Let it go to its end."""
        problems = self.problems
        try:
            ended = self.world.run(lambda: self._over and not self.workers, self.limit_s)
            if not ended:
                problems.append(f"stuck: {self._situation()}")
        except Broken as error:
            problems.append(f"{error}: {self._situation()}")
        self.check()
        problems += [f"{who}, thread {thread}: {error!r}" for who, thread, error in self.world.unexpected]
        seconds, turns = self.world.now, self.world.turns
        self.world.close()
        tape = sorted([*self.faults.tape, *self.tape], key=lambda one: one[0])
        faults = self.faults
        return Outcome(
            self.seed, problems, faults.counts, faults.drawn, tape, self.exchanges, seconds, turns, self.terms.expected
        )

    def _situation(self) -> str:
        """For people."""
        said = self.server._machine.status(self.world.now) if self.server is not None else None
        there = f"processes: {', '.join(one.name for one in self.workers.values()) or 'none'}"
        if said is None:
            return there
        workers = [
            f"worker {one['worker']} on {one['host']} ({'member' if one['member'] else 'waits'}, at exchange "
            f"{one['came_to']}{', commits' if one['commits'] else ''}{', absent' if one['absent'] else ''})"
            for one in [*said["members"], *said["waiting"]]
        ]
        why = said["ended"] or said["paused"] or said["reason"]
        return (
            f"{said['exchange']} exchanges; generation {said['generation']}: {', '.join(workers) or 'nobody'}; {why}; "
            f"{there}"
        )

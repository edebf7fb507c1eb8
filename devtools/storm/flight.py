# SPDX-License-Identifier: Apache-2.0
"""A recorded elastic run in a simulated world: the flight tape, played again, as it was or with something changed.

Workers come when they came, counted from the commit before; they make as many minibatches for each exchange as they
made, as fast as they were; and they die at the place in the protocol where they died. What is left to chance, such as
the order of messages within a millisecond, the seed decides. If the recorded run was cut short, the replay goes on to
the end of the last epoch that was begun.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from devtools.storm.control import ControlStorm
from devtools.storm.elastic import CALM_S, StormSettings
from devtools.storm.meeting import Meetings
from devtools.storm.member import Job, Member, Truth, program
from devtools.storm.tape import Block, Flight
from devtools.world.process import Process, SimMachine

from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.flow.control.messages import Generation, Terms

LOOK_S = 0.005
HEAL_S = 1.0
TURNS_A_SECOND = 400
"""Of the world, at most, beside those of exchanges."""


class TapeStorm(ControlStorm):
    """The recorded run.

    Args:
        seed: decides what the tape does not say.
        settings: with what is played.
        without: nothing.

    Attributes:
        generations: number and members, up to the first worker that came to its end.
        ended_s: when the last exchange was committed.
        lost, repeated: minibatches that are not in a model at the end, or more than once.
        deaths: workers that the control plane has lost.
    """

    flight = True

    def __init__(self, seed: int, settings: StormSettings, without: Collection[int] = ()) -> None:
        assert settings.played is not None
        self.played, self.recorded = settings.played, settings.played.tape
        self.generations: list[tuple[int, tuple[int, ...]]] = []
        self.commits: dict[int, float] = {0: 0.0}
        self.lost = self.repeated = self.deaths = 0
        self._left = False
        self._coming = list(self.recorded.flights)
        self._starting: Flight | None = None
        self._restarts = list(self.recorded.restarts)
        self._away_s = 0.0
        self._hosts: dict[str, SimMachine] = {}
        self._processes: dict[int, Process] = {}
        self._flights: dict[Process, Flight] = {}
        wire_s = self.recorded.wire_s if self.played.wire_s is None else self.played.wire_s
        self._wire_s = wire_s
        self.limit_s = CALM_S + 10 * (self.recorded.seconds + wire_s * (self.recorded.exchanges + 1))
        super().__init__(seed, settings, without)

    def agree(self) -> Terms:
        return self.recorded.terms

    def prepare(self) -> None:
        total, unit, _ = self.recorded.data
        self.truth = Truth()
        world, batches = self.world, -(-total // unit)
        world.further_turns = int(TURNS_A_SECOND * self.limit_s)
        meetings = Meetings(world, self._wire_s)
        self.job = Job(
            world, self.place, batches, self.recorded.epochs, self.recorded.terms.timeout_s, meetings, self.truth
        )

    @property
    def ended_s(self) -> float:
        """When the last exchange was committed."""
        return self.commits[max(self.commits)]

    # -- arrivals ---------------------------------------------------------------------------------

    def arrive(self) -> None:
        self._let_in()
        self._let_down()

    def before(self, exchange: int) -> bool:
        """Whether all workers have come that came before this exchange was committed."""
        due = self._starting or (self._coming[0] if self._coming else None)
        return due is None or due.after >= exchange

    def _when(self, after: int, recorded_s: float) -> float | None:
        """When something happens that happened after this exchange; None: not yet known."""
        if not self.played.exact:
            return max(self.world.now, recorded_s)
        if after not in self.commits:
            return None
        return max(self.world.now, self.commits[after] + recorded_s - self.recorded.commits.get(after, 0.0))

    def _let_in(self) -> None:
        """Let the next worker come, in its time: each after the one before."""
        if self._starting is None and self._coming:
            one = self._coming[0]
            when = self._when(one.after, one.joined_s)
            if when is not None:
                self._starting = self._coming.pop(0)
                self.world.at(when, partial(self._come, one))

    def _come(self, one: Flight) -> None:
        machine = self._hosts.get(one.host) or self.world.machine(one.host)
        self._hosts[one.host] = machine
        self._start_worker(machine)

    def program(self, done: Callable[[BaseException | None], None]) -> Callable[[], None]:
        flight = self._starting
        if flight is None:  # started to heal
            pace = self.recorded.pace()
            flight = Flight(-1, "", 0.0, 0, blocks={1: pace})
        return program(self.job, done, lambda job: TapeMember(job, self, flight))

    def met(self, process: Process, flight: Flight, worker: int) -> None:
        """A worker's process knows its number."""
        self._processes[worker], self._flights[process] = process, flight
        if not self.played.exact and flight.end == "lost":
            silence = self.terms.silence_s if flight.silent else 0.0
            self.world.at(max(self.world.now, flight.end_s - silence), partial(self.end, process, flight))

    def end(self, process: Process, flight: Flight) -> None:
        """A worker dies as it died."""
        if not process.dead:
            self.tape.append((self.world.now, f"{'stopped' if flight.silent else 'killed'}: {process.name}"))
            process.stop() if flight.silent else process.kill()

    def _let_down(self) -> None:
        """Let the control plane die when it did."""
        if self._restarts:
            one = self._restarts[0]
            when = self._when(one.after, self.recorded.commits.get(one.after, 0.0) + one.after_s)
            if when is not None:
                self._restarts.pop(0)
                self._away_s = one.away_s
                self.world.at(when, self._kill_control)

    def _kill_control(self) -> None:
        if self.control is not None:
            self.tape.append((self.world.now, "killed: control"))
            self.control.kill()

    def restart_s(self) -> float:
        return self._away_s or super().restart_s()

    def replace(self, machine: SimMachine) -> None:
        """Nobody, until all have come that came: then as many as the run needs to come to its end."""
        if not self._coming and self._starting is None and len(self.workers) < self.terms.min_workers:
            self.world.after(HEAL_S, lambda: self._start_worker(machine))

    # -- what happens -----------------------------------------------------------------------------

    def _told(self, kind: str, about: dict[str, Any]) -> None:
        super()._told(kind, about)
        if kind == "exchange":
            self.commits[int(about["exchange"])] = self.world.now
        elif kind == "joined":
            self._starting = None
        elif kind == "left":
            self._left = True
        elif kind == "lost" and about["worker"] in self._processes:
            self.deaths += 1
            self.world.after(0.0, self._processes[about["worker"]].kill)
        elif kind == "generation" and not self._left:
            self.generations.append((about["number"], tuple(one[0] for one in about["members"])))
        if kind in ("exchange", "joined"):
            self._let_in()
            self._let_down()

    def check(self) -> None:
        super().check()
        self.exchanges = max(self.commits)
        places = self.job.epochs * self.job.samples
        for model in self.truth.ended.values():
            self.lost = max(self.lost, places - len(+model))
            self.repeated = max(self.repeated, sum(model.values()) - len(+model))


class TapeMember(Member):
    """A recorded worker.

    Args:
        job: of all workers.
        storm: the run.
        flight: what this one did.
    """

    def __init__(self, job: Job, storm: TapeStorm, flight: Flight) -> None:
        self.storm, self.flight = storm, flight
        self._pace = storm.recorded.pace(flight.worker)
        self._lease: Mark | None = None
        super().__init__(job, self._look)
        storm.met(self.process, flight, self.client.worker)
        self._last(0)

    def _last(self, exchange: int) -> None:
        """If this is the last thing that the worker did, it dies so long after it as it did."""
        flight, storm = self.flight, self.storm
        if storm.played.exact and flight.end == "lost" and exchange == max(flight.came, flight.reported):
            silence = storm.terms.silence_s if flight.silent else 0.0
            self.job.world.after(max(0.0, flight.after_s - silence), partial(storm.end, self.process, flight))

    def _look(self, member: Member, act: str, exchange: int) -> None:
        flight, storm = self.flight, self.storm
        if not storm.played.exact:
            return
        until = runtime.monotonic() + storm.terms.timeout_s / 4
        while act == "commits" and not storm.before(exchange) and runtime.monotonic() < until:
            runtime.sleep(LOOK_S)
        if flight.end != "lost":
            return
        last = flight.came if act == "starts" else flight.reported
        if exchange > last:
            storm.end(self.process, flight)
            runtime.sleep(0)
        elif exchange == last and (act == "commits" or flight.came > flight.reported):
            self._last(exchange)

    def _block(self) -> Block:
        """Minibatches for the next exchange, and their seconds."""
        recorded = self.flight.blocks.get(self.generation.exchange + 1)
        block = recorded if self.storm.played.exact and recorded is not None and recorded.minibatches else self._pace
        most = self.storm.played.block
        return block if most is None else Block(most, most * block.seconds / block.minibatches)

    def _adopt(self, generation: Generation) -> None:
        if self.client.worker in generation.newcomers:
            self._lease = None
        super()._adopt(generation)

    def _over(self, epoch: int) -> bool:
        client, block = self.client, self._block()
        most = self.storm.recorded.data[2]
        while len(self.held) < block.minibatches and client.called <= self.generation.exchange:
            if self._lease is None:
                kind, self._lease = client.ask(Question(0, epoch, self.job.samples, 1, most, dry=True))
                if self._lease is None:
                    if self.held or kind == "over":
                        return not self.held
                    if client.called <= self.generation.exchange:
                        client.wait_news(self.job.timeout_s)
                    continue
            runtime.sleep(block.seconds / block.minibatches)
            loader, its, begin, end = self._lease
            self.held.append((loader, its, begin, begin + 1))
            self._lease = (loader, its, begin + 1, end) if begin + 1 < end else None
        return False

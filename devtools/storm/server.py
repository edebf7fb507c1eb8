# SPDX-License-Identifier: Apache-2.0
"""A storm over asynchronous rules: real workers, each with the server inside it, and a model that counts its samples.

First faults, then none, and all that may go on must come to the end. Nobody replaces a lost worker: what it owned goes
to its neighbour, and of two sides of a partition one goes on. Where two neighbours are lost, the run ends by name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from devtools.storm.elastic import CALM_S, STORM_S, TIMEOUT_S, Outcome, StormSettings
from devtools.storm.faults import SERVER_KINDS, Faults, chosen
from devtools.storm.group import Group, GroupTransport
from devtools.storm.ones import Ones
from devtools.storm.server_checks import Ended, Worker, problems_of
from devtools.world.process import Process, World
from devtools.world.scheduler import Broken
from torch.utils.data import DataLoader

from paceline.core import runtime
from paceline.core.world import World as Coordinates
from paceline.errors import PacelineError, RuleError
from paceline.rules.outer import DelayCompensated, Share, Sum
from paceline.rules.recipes import rule_from_text
from paceline.rules.rule import Rule
from paceline.rules.topology import Sharded
from paceline.rules.topology.sharded import UNIT
from paceline.run.run import Run
from paceline.update.engine.settings import Settings

RULES = (
    "asgd",
    "asgd(overlap=0)",
    "asgd(hold=3)",
    "asgd(period=3)",
    "asgd(period=2, hold=2)",
    "asgd(period=8)",
    "ssp(staleness=1)",
    "ssp(staleness=3)",
    "ssp(staleness=2, period=3)",
    "dc_asgd",
    "dc_asgd(hold=2)",
)
STEP_S = (0.005, 0.3)
"""Seconds of a minibatch, from the fastest run to the slowest."""
LOOK_S = 0.5
"""Between two looks at threads and connections."""


def countable(text: str) -> Rule:
    """The rule, with rows of the model as shards, and without the division of steps by the number of workers.

    Raises:
        RuleError: the model cannot count under it.
    """
    rule = rule_from_text(text)
    if not isinstance(rule.topology, Sharded):
        raise RuleError(f"a storm over the server is over asynchronous rules, got {text!r}: take --over run")
    outer = Sum() if isinstance(rule.outer, Share) else rule.outer
    if not isinstance(outer, (Sum, DelayCompensated)):
        raise RuleError(f"the model of a storm cannot count under {text!r}: take one of {', '.join(RULES)}")
    return replace(rule, topology=Sharded(UNIT), outer=outer)


class ServerStorm:
    """One world with one asynchronous run.

    Args:
        seed: decides everything.
        settings: what it is over.
        without: numbers of faults that are left out.
    """

    def __init__(self, seed: int, settings: StormSettings, without: Collection[int] = ()) -> None:
        self.seed, self.world = seed, World(seed)
        rng, world = self.world.rng, self.world
        low, high = settings.workers
        most = rng.choice([low + 1, low + 2, high])  # large ones take long
        self.size = max(2, rng.randint(low, min(most, high)))
        self.rule = countable(settings.rule or rng.choice(RULES))
        # Compensation for delays sees a sample's own weight: in a second epoch it would change the count.
        self.epochs = 1 if isinstance(self.rule.outer, DelayCompensated) else rng.choice([1, 1, 2])
        self.samples, self.batch = rng.randint(8, UNIT), rng.choice([1, 1, 2, 3])
        self.rows, self.parameters = self.size * rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
        hosts = rng.randint(1, self.size)
        self.machines = [world.machine(f"host{k}") for k in range(hosts)]
        self.places = sorted(rank % hosts for rank in range(self.size))
        self.pause_s = [self._step_s() for _ in range(self.size)]
        self.group = Group(world, self.size)
        self.control_machine = self.machines[0]
        self.control: Process | None = None  # such a run has none
        self.workers: dict[int, Process] = {}
        self.told = [Worker(rank) for rank in range(self.size)]
        self.tape: list[tuple[float, str]] = []
        self.problems: list[str] = []
        for rank in range(self.size):
            self._start(rank)
        self.faults = Faults(self, chosen(SERVER_KINDS, settings.faults), without)
        self._count, self._begun = rng.randint(1, 6), False
        # Half of the seeds have their faults while the workers train, which is shorter than a storm.
        self._within_s = STORM_S if seed % 4 in (1, 2) else min(STORM_S, self._training_s())
        if rng.random() < 0.1:  # also while they meet
            self._begin()

    def _step_s(self) -> float:
        low, high = STEP_S
        return float(low * (high / low) ** self.world.rng.random())

    def _training_s(self) -> float:
        """Seconds of the training, where nothing happens to it."""
        samples_s = sum(self.batch / pause for pause in self.pause_s)
        return self.epochs * self.samples / samples_s

    def join(self) -> None:
        """Nobody joins."""

    def _start(self, rank: int) -> None:
        machine = self.machines[self.places[rank]]
        process = machine.start(partial(self._program, rank), f"rank {rank}")
        self.workers[rank] = self.group.processes[rank] = process
        process.on_end.append(partial(self._process_ended, rank))

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self.faults.begin(self._count, STORM_S, self._within_s)
            self.world.after(LOOK_S, self._look)

    # -- a worker ---------------------------------------------------------------------------------

    def _program(self, rank: int) -> None:
        try:
            self._train(rank)
        except PacelineError as error:
            self.told[rank].error = error
            raise

    def _train(self, rank: int) -> None:
        model, told, rng = Ones(self.rows, self.parameters), self.told[rank], self.world.rng
        optimizers = [torch.optim.SGD([one], lr=1.0) for one in model.counts]
        hosts = tuple(self.machines[place].name for place in self.places)
        mates = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        me = Coordinates(rank, self.size, mates.index(rank), len(mates), hosts[rank], hosts)
        settings = Settings(group=GroupTransport(self.group, me, TIMEOUT_S), timeout_s=TIMEOUT_S)
        with Run(model, optimizers, self.rule, settings) as run:
            engine: Any = run._parts.engine
            told.attached(engine, partial(self._told, rank))
            run._context.monitor.note = told.note  # type: ignore[method-assign]
            if all(one.service is not None for one in self.told):
                self._begin()
            share = run.share(DataLoader(list(range(self.samples)), self.batch, shuffle=True))  # type: ignore[arg-type]
            clients = list(engine._clients)
            for _ in range(self.epochs):
                for ids in share:
                    runtime.sleep(self.pause_s[rank] * (0.5 + rng.random()))
                    model.count(ids, [client.clock for client in clients], self.rule.steps_at_owners)
                    for optimizer in optimizers:
                        optimizer.step()
        left = [one.name for one in self.group.processes[rank].threads if one.name != "main"]
        told.ended = Ended(model.times(), run.blocks, left)

    def _told(self, rank: int, kind: str, said: str) -> None:
        self.tape.append((self.world.now, f"rank {rank}: {kind}: {said}"))

    def _process_ended(self, rank: int) -> None:
        process, told = self.workers.pop(rank), self.told[rank]
        told.killed = process.killed
        if process.error is not None and not isinstance(process.error, PacelineError):
            self.problems.append(f"{process.name} ended: {process.error!r}")
        why = "is killed" if told.killed else "ends" + (f": {process.error}" if process.error is not None else "")
        self.tape.append((self.world.now, f"rank {rank} {why}"))
        if not self.workers:
            return
        self._begin()

    # -- the run ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Threads and connections of a worker stay bounded."""
        threads, channels = 2 * self.size + 6, 2 * (self.size - 1)
        for process in self.workers.values():
            if len(process.threads) > threads or len(process.channels) > channels:
                self.problems.append(
                    f"{process.name} has {len(process.threads)} threads and {len(process.channels)} connections"
                )
        if self.workers and len(self.problems) < 5:
            self.world.after(LOOK_S, self._look)

    def run(self) -> Outcome:
        """Let it go to its end."""
        problems = self.problems
        try:
            if not self.world.run(lambda: not self.workers, STORM_S + CALM_S):
                problems.append(f"stuck: {self._situation()}")
        except Broken as error:
            problems.append(f"{error}: {self._situation()}")
        safe = {rank for rank in range(self.size) if not self._touched(rank)}
        problems += problems_of(self.told, self.epochs, self.samples, safe)
        problems += [f"{who}, thread {thread}: {error!r}" for who, thread, error in self.world.unexpected]
        seconds, turns = self.world.now, self.world.turns
        self.world.close()
        pushes = sum(one.ended.pushes for one in self.told if one.ended is not None)
        tape, faults = sorted([*self.faults.tape, *self.tape]), self.faults
        return Outcome(self.seed, problems, faults.counts, faults.drawn, tape, pushes, seconds, turns)

    def _touched(self, rank: int) -> bool:
        touched = self.faults.touched
        process = self.group.processes[rank]
        return process in touched or process.address in touched

    def _situation(self) -> str:
        return f"rule {self.rule.text()}; processes {[process.name for process in self.workers.values()]}"

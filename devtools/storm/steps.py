# SPDX-License-Identifier: Apache-2.0
"""A storm over the checkpoint steps of a lockstep run: whatever happens, it resumes with the bits of one that went on.

A launcher kills all workers of an attempt when one has ended with an error, and starts them again; they resume from
the newest step that is whole on all hosts. Each host has a disk of its own, or all share one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from devtools.storm import disk_faults
from devtools.storm.elastic import CALM_S, STORM_S, TIMEOUT_S, Outcome, StormSettings
from devtools.storm.faults import KINDS, Faults, chosen
from devtools.storm.steps_checks import Resuming, StepChecks
from devtools.world.disk import SimDisk
from devtools.world.process import Process, SimMachine, World
from devtools.world.scheduler import Broken
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.checkpoint.files import is_step
from paceline.communication.ring import RingListener, RingTransport
from paceline.core import runtime
from paceline.core.world import World as Coordinates
from paceline.errors import CheckpointError, PacelineError, PeerLostError, RuleError
from paceline.rules.recipes import rule_from_text
from paceline.rules.topology import Sharded
from paceline.run.run import Run
from paceline.update.engine.settings import Settings

PLACE = Path("/runs/steps")
RULES = ("averaging(period=2)", "bmuf(period=2)", "sync")
STEP_S = (0.01, 0.25)
"""Seconds of a minibatch."""
FAULTS_S = 4.0
"""Seconds in which faults happen."""
STEP_KINDS: dict[str, Callable[[Faults], str]] = {
    **{
        name: KINDS[name] for name in ("kill_worker", "power_worker", "stop_worker", "isolate", "reset", "slow_network")
    },
    **disk_faults.OF_DISKS,
    **disk_faults.OF_MACHINES,
}
"""By name, of lockstep runs with steps."""


class Chaotic(nn.Module):
    """Weights of which every bit depends on all samples so far, and on their order."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(-1.0, 1.0, 24))

    def loss(self, ids: Tensor) -> Tensor:
        """Of a minibatch of samples, which are numbers."""
        return torch.cos(3.0 * self.weights + ids.to(torch.float32).sum()).sum()


def in_lockstep(text: str) -> None:
    """Raise `RuleError` for a rule under which workers are never at the same place, so that none writes steps."""
    if isinstance(rule_from_text(text).topology, Sharded):
        raise RuleError(f"a storm over steps is over rules that exchange together, got {text!r}: take --over server")


@dataclass
class Attempt:
    """One start of all workers.

    Attributes:
        run: number of the launcher.
        number: of the attempt.
        addresses: of the workers' listeners, by rank.
        processes: by rank.
        attached: ranks that have got through `attach`.
        resuming: what there was when the first rank began to look for a step.
        resumed: the minibatches at which each rank goes on.
        trained: whether a rank has made a step.
        closing: whether a rank has come to the end of its training.
        ended: ranks that came to the end of their program.
    """

    run: int
    number: int
    addresses: dict[int, tuple[str, int]] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    attached: set[int] = field(default_factory=set)
    resuming: Resuming | None = None
    resumed: dict[int, int] = field(default_factory=dict)
    trained: bool = False
    closing: bool = False
    ended: set[int] = field(default_factory=set)

    @property
    def trains(self) -> bool:
        """Whether all workers live, are through `attach`, and need the place."""
        return (
            bool(self.processes)
            and not self.closing
            and len(self.attached) == len(self.processes)
            and not any(one.dead for one in self.processes)
        )


class StepsStorm:
    """One world with one lockstep run, and at times a second one that was given the same place.

    Args:
        seed: decides everything.
        settings: what it is over.
        without: numbers of faults that are left out.
    """

    def __init__(self, seed: int, settings: StormSettings, without: Collection[int] = ()) -> None:
        self.settings, self.seed, self.world = settings, seed, World(seed)
        rng = self.world.rng
        self.size = rng.randint(*settings.workers)
        hosts = rng.randint(1, self.size)
        shared = SimDisk(self.world) if hosts > 1 and rng.random() < 0.4 else None
        self.shared = shared
        self.machines = [self.world.machine(f"host{number}", shared) for number in range(hosts)]
        self.of_rank = [self.machines[rank * hosts // self.size] for rank in range(self.size)]
        self.rule = settings.rule or rng.choice(RULES)
        self.samples, self.epochs = rng.randint(4, 14) * self.size, rng.choice([1, 1, 2])
        self.every, self.keep = rng.randint(1, 4), rng.randint(1, 3)
        self.problems: list[str] = []
        self.tape: list[tuple[float, str]] = []
        self.workers: dict[int, Process] = {}
        self.history: dict[tuple[int, int], str] = {}
        self.checks = StepChecks(PLACE, [machine.disk for machine in self.of_rank], self.keep, self.problems)
        self.exchanges = 0
        self._attempts: list[Attempt] = []
        self._launchers = 0
        self._started = 0
        self._over = False
        self.second_launcher()
        self.faults = Faults(self, chosen(STEP_KINDS, settings.faults), without)
        self.faults.begin(rng.randint(1, 8), FAULTS_S)

    # -- what faults ask --------------------------------------------------------------------------

    @property
    def control_machine(self) -> SimMachine:
        """The first worker's: there is no control plane."""
        return self.machines[0]

    @property
    def control(self) -> Process | None:
        """There is none."""
        return None

    def join(self) -> None:
        """The number of workers is fixed."""

    @property
    def disks(self) -> list[SimDisk]:
        """Those with steps."""
        return [self.shared] if self.shared is not None else [machine.disk for machine in self.machines]

    def damaged(self, why: str) -> None:
        """A bit of this file has flipped."""
        self.checks.flipped(why)

    def second_launcher(self) -> None:
        """Start the same training a second time, at the same place, under another name."""
        if not self._over:
            self._launchers += 1
            self._launch(self._launchers)

    # -- the launcher -----------------------------------------------------------------------------

    def _launch(self, run: int) -> None:
        if self._over:
            return
        attempt = Attempt(run, len(self._attempts))
        self._attempts.append(attempt)
        for rank, machine in enumerate(self.of_rank):
            number, self._started = self._started, self._started + 1
            name = f"run {run}, attempt {attempt.number}, rank {rank}"
            process = self.workers[number] = machine.start(partial(self._worker, attempt, rank), name)
            attempt.processes.append(process)
            process.on_end.append(partial(self._ended, attempt, rank, number))

    def _ended(self, attempt: Attempt, rank: int, number: int) -> None:
        process = self.workers.pop(number)
        error = process.error
        self.tape.append((self.world.now, f"{process.name} ends" + ("" if error is None else f": {error!r}")))
        if error is not None:
            self._judge(attempt, process, error)
        if rank in attempt.ended:
            if len(attempt.ended) == self.size:
                self._over = True  # the second launcher's training is the same one, and over, too
                self.world.after(1.0, self._end_all)
        else:
            self.world.after(0.02 + 0.05 * self.world.rng.random(), lambda: self._give_up(attempt))

    def _end_all(self) -> None:
        for process in list(self.workers.values()):
            process.kill()

    def _give_up(self, attempt: Attempt) -> None:
        """Kill what is left of an attempt, and start the next one."""
        if attempt.processes and not self._over:
            for process in attempt.processes:
                process.kill()
            attempt.processes = []
            self.world.after(0.05 + 0.5 * self.world.rng.random(), lambda: self._launch(attempt.run))

    def _judge(self, attempt: Attempt, process: Process, error: BaseException) -> None:
        """Whether a worker may end so."""
        text = str(error)
        if isinstance(error, CheckpointError) and "is whole" in text:
            self.checks.none_is_whole(process.name, attempt.resuming)
            self.checks.moved_away()  # what the error asks the user for
        elif isinstance(error, CheckpointError) and attempt.trained:
            self.problems.append(f"{process.name} ended in its training: {text}")
        elif isinstance(error, CheckpointError) and not ("in use" in text or self.faults.counts):
            self.problems.append(f"{process.name} was refused without a reason: {text}")
        elif isinstance(error, PeerLostError) and not self.faults.counts:
            self.problems.append(f"{process.name} lost a peer, and there was no fault: {text}")
        elif not isinstance(error, PacelineError):
            self.problems.append(f"{process.name} ended: {error!r}")

    # -- a worker ---------------------------------------------------------------------------------

    def _worker(self, attempt: Attempt, rank: int) -> None:
        machine = self.of_rank[rank]
        transport = self._meet(attempt, rank, machine)
        low, high = STEP_S
        rng = self.world.rng
        model = Chaotic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = Settings(
            group=transport, timeout_s=TIMEOUT_S, checkpoint=PLACE, every_blocks=self.every, keep=self.keep
        )
        with Run(model, optimizer, rule_from_text(self.rule), settings) as run:
            self._attached(attempt, rank, run)
            attempt.resuming = attempt.resuming or Resuming(self.checks)
            run.resume()
            self._resumed(attempt, rank, run.minibatches)
            share = run.share(DataLoader(list(range(self.samples)), 1, shuffle=True))  # type: ignore[arg-type]
            for _ in range(run.epoch, self.epochs):
                for ids in share:
                    self._at(rank, run.minibatches, model, optimizer)
                    runtime.sleep(low + (high - low) * rng.random())
                    optimizer.zero_grad()
                    model.loss(ids).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    attempt.trained = True
            self.exchanges = max(self.exchanges, run.minibatches)
            attempt.closing = True
        self._at(rank, 1 << 30, model, optimizer)
        attempt.ended.add(rank)

    def _meet(self, attempt: Attempt, rank: int, machine: SimMachine) -> RingTransport:
        """As a launcher's store lets workers meet."""
        listener = RingListener(machine.address, None)
        attempt.addresses[rank] = listener.address, listener.port
        until = runtime.monotonic() + TIMEOUT_S
        while len(attempt.addresses) < self.size:
            if runtime.monotonic() > until:
                raise PeerLostError("the others did not come to the meeting")
            runtime.sleep(0.01)
        hosts = tuple(one.name for one in self.of_rank)
        mates = [other for other in range(self.size) if self.of_rank[other] is machine]
        world = Coordinates(rank, self.size, mates.index(rank), len(mates), machine.name, hosts)
        addresses = [attempt.addresses[other] for other in range(self.size)]
        return RingTransport(listener, f"attempt {attempt.number}", world, addresses, TIMEOUT_S, owns_listener=True)

    # -- what is checked --------------------------------------------------------------------------

    def _attached(self, attempt: Attempt, rank: int, run: Any) -> None:
        attempt.attached.add(rank)
        for other in self._attempts:
            if attempt.trains and other.run != attempt.run and other.trains:
                self.problems.append(f"runs {other.run} and {attempt.run} both train at one place")

        def told(kind: str, about: dict[str, Any]) -> None:
            if kind == "save":
                self.tape.append((self.world.now, f"rank {rank} has saved step {about['minibatches']}"))
            elif kind == "save_failed":
                self.tape.append((self.world.now, f"rank {rank}: {about['why']}"))
                if not self.faults.counts:
                    self.problems.append(f"rank {rank} could not save, and there was no fault: {about['why']}")

        self.checks.watch(run, self.of_rank[rank].disk, told)

    def _resumed(self, attempt: Attempt, rank: int, minibatches: int) -> None:
        attempt.resumed[rank] = minibatches
        if len(set(attempt.resumed.values())) > 1:
            self.problems.append(f"workers resume from different steps: {attempt.resumed}")
        assert attempt.resuming is not None
        self.checks.resumed(attempt.processes[rank].name, minibatches, attempt.resuming)
        if len(attempt.resumed) == self.size:
            self.checks.all_resumed(minibatches)

    def _at(self, rank: int, minibatches: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The bits of a worker after so many minibatches are always the same."""
        digest = hashlib.sha256()
        for weights in model.parameters():
            state = optimizer.state.get(weights, {})
            for tensor in (weights, *(part for part in state.values() if isinstance(part, Tensor))):
                digest.update(tensor.detach().numpy().tobytes())
        bits = self.history.setdefault((rank, minibatches), digest.hexdigest())
        if bits != digest.hexdigest():
            self.problems.append(f"rank {rank} has other bits after {minibatches} minibatches than it had before")

    # -- the run ----------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Let it go to its end."""
        problems = self.problems
        try:
            if not self.world.run(lambda: bool(problems) or (self._over and not self.workers), STORM_S + CALM_S):
                problems.append(f"stuck: {self._situation()}")
        except Broken as error:
            problems.append(f"{error}: {self._situation()}")
        for disk in self.disks:
            steps = {file.parent.name for file in disk.files(PLACE) if is_step(file.parent)}
            if not self.faults.counts and len(steps) > self.keep:
                problems.append(f"{sorted(steps)} are kept, and {self.keep} were to be")
        problems += [f"{who}, thread {thread}: {error!r}" for who, thread, error in self.world.unexpected]
        seconds, turns = self.world.now, self.world.turns
        self.world.close()
        tape = sorted([*self.faults.tape, *self.tape])
        faults = self.faults
        return Outcome(self.seed, problems, faults.counts, faults.drawn, tape, self.exchanges, seconds, turns)

    def _situation(self) -> str:
        return f"processes {[process.name for process in self.workers.values()]}, agreed steps {self.checks.agreed}"

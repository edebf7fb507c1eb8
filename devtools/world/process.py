# SPDX-License-Identifier: Apache-2.0
"""Simulated machines and their processes, which can be killed between any two events, stopped and continued."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from devtools.world.disk import SimDisk, SimFileLock
from devtools.world.locks import SimCondition, SimEvent, SimLock, SimQueue
from devtools.world.network import ProcessNetwork, SimChannel, SimListener, SimNetwork
from devtools.world.scheduler import Killed, Owner, Scheduler, SimThread

EPOCH_S = 1_800_000_000.0
"""What wall clocks show when a world begins, if they are right."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Generators of killed processes end without a word, and no garbage is collected at times that no seed decides."""
    before, collects = sys.unraisablehook, gc.isenabled()

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, Killed):
            before(unraisable)

    sys.unraisablehook = hook
    gc.disable()
    try:
        yield
    finally:
        sys.unraisablehook = before
        if collects:
            gc.enable()


class World(Scheduler):
    """Machines on a network, under one seed.

    Attributes:
        network: of all machines.
        machines: by address.
        processes: how many there were.
        unexpected: errors that ended a thread which no program foresaw: process, thread, error.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.network = SimNetwork(self)
        self.machines: dict[str, SimMachine] = {}
        self.processes = 0
        self.unexpected: list[tuple[str, str, BaseException]] = []
        self._pids = 1000

    def machine(self, name: str, disk: SimDisk | None = None) -> SimMachine:
        """A further machine; with a disk of its own, or one of a file server that outlasts it."""
        address = f"10.0.{len(self.machines) // 250}.{len(self.machines) % 250 + 1}"
        made = self.machines[address] = SimMachine(self, name, address, disk)
        return made

    def next_pid(self) -> int:
        """Of a new process; no two have the same."""
        self._pids += 1
        return self._pids

    def run(self, stop: Callable[[], bool], seconds: float) -> bool:
        """Let the world go on until `stop()`; False if that did not come within so many seconds, or never can."""
        with _quiet():
            return super().run(stop, seconds)

    def close(self) -> None:
        """End all threads."""
        living = [process for machine in self.machines.values() for process in machine.processes]
        for process in living:
            process.kill()
        self.error, self.turns = None, 0
        self.run(lambda: not any(process.threads for process in living), 1.0)


class SimMachine:
    """A machine.

    Attributes:
        name: for messages.
        address: on the network.
        disk: its files, which outlast its processes.
        processes: that live.
        rate: seconds of its clock in a second of the world.
        wall_off_s: by how many seconds its wall clock is wrong.
    """

    def __init__(self, world: World, name: str, address: str, disk: SimDisk | None = None) -> None:
        self.world, self.name, self.address = world, name, address
        self.disk, self._own_disk = disk or SimDisk(world), disk is None
        self.rate, self.wall_off_s = 1.0, 0.0
        self._clock = 0.0, 0.0  # world's time, and what the clock showed, when the rate was set
        self.processes: dict[Process, None] = {}

    def monotonic(self) -> float:
        """What its clock shows that never goes back."""
        since, shown = self._clock
        return shown + self.rate * (self.world.now - since)

    def set_rate(self, rate: float) -> None:
        """From now on its clock runs at this rate."""
        self._clock = self.world.now, self.monotonic()
        self.rate = rate

    def start(self, program: Callable[[], object], name: str) -> Process:
        """A process that runs `program`."""
        process = Process(self, name)
        self.processes[process] = None
        process.main = process.thread(program, (), "main")
        process.threads[process.main] = None
        process.main.launch()
        return process

    def fail(self) -> None:
        """Power fails: all processes are dead, the disk has what was synced, and no peer is told."""
        self.world.network.vanish(self.address)
        for process in list(self.processes):
            process.kill()
        if self._own_disk:
            self.disk.fail()


class _ProcessDisk:
    """The disk as a process has it: a killed one does nothing more."""

    def __init__(self, process: Process, disk: SimDisk) -> None:
        self._process, self._sim = process, disk

    @property
    def _disk(self) -> SimDisk:
        self._process.check()
        return self._sim

    def write(self, path: Path, data: bytes) -> None:
        self._disk.write(path, data)

    def write_private(self, path: Path, data: bytes) -> None:
        self._disk.write(path, data)

    def writing(self, path: Path) -> AbstractContextManager[Path]:
        return self._disk.writing(path)

    def sync(self, path: Path) -> None:
        self._disk.sync(path)

    def sync_folder(self, path: Path) -> None:
        self._disk.sync_folder(path)

    def replace(self, path: Path, target: Path) -> None:
        self._disk.replace(path, target)

    def make_folder(self, path: Path) -> None:
        self._disk.make_folder(path)

    def remove(self, path: Path) -> None:
        self._disk.remove(path)

    def remove_folder(self, path: Path) -> None:
        self._disk.remove_folder(path)

    def read(self, path: Path) -> bytes:
        return self._disk.read(path)

    def open(self, path: Path) -> BinaryIO:
        return self._disk.open(path)

    def reading(self, path: Path) -> AbstractContextManager[Path]:
        return self._disk.reading(path)

    def size(self, path: Path) -> int:
        return self._disk.size(path)

    def names(self, path: Path) -> list[str]:
        return self._disk.names(path)

    def exists(self, path: Path) -> bool:
        return self._disk.exists(path)

    def is_file(self, path: Path) -> bool:
        return self._disk.is_file(path)

    def is_folder(self, path: Path) -> bool:
        return self._disk.is_folder(path)

    def is_link(self, path: Path) -> bool:
        return self._disk.is_link(path)

    def lock(self, path: Path) -> SimFileLock | None:
        taken = self._disk.lock_for(self._process, path)
        if taken is not None:
            self._process.locks.append(taken)
        return taken


class Process(Owner):
    """A process; for its threads it is what `paceline.core.runtime` asks.

    Attributes:
        error: that ended its main thread; None if that ended well.
        dead: whether it has ended, for whatever reason.
        stopped: whether it gets no processor at present.
    """

    main: SimThread

    def __init__(self, machine: SimMachine, name: str) -> None:
        self.machine, self.name = machine, name
        self.host, self.address = machine.name, machine.address
        self.world: World = machine.world
        self.dead = self.stopped = self.killed = False
        self.error: BaseException | None = None
        self.threads: dict[SimThread, None] = {}
        machine.world.processes += 1
        self.number = machine.world.processes
        self.identity = [machine.name, "pid", str(self.number), str(self.world.now)]
        self.channels: dict[SimChannel, None] = {}
        self.listeners: dict[SimListener, None] = {}
        self.locks: list[SimFileLock] = []
        self.pid = self.world.next_pid()
        self.on_end: list[Callable[[], None]] = []
        self.disk = _ProcessDisk(self, machine.disk)
        self.network = ProcessNetwork(machine.world.network, self)

    def kill(self) -> None:
        """SIGKILL."""
        self.killed = not self.dead
        self._end()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped = False
        self.world.release_held()

    def _end(self) -> None:
        if self.dead:
            return
        self.dead = True
        self.machine.processes.pop(self, None)
        for listener in list(self.listeners):
            listener.close()
        for channel in list(self.channels):
            channel.close()
        for lock in self.locks:
            lock.end()
        for thread in list(self.threads):
            self.world.wake(thread)
        self.world.release_held()
        for call in self.on_end:
            self.world.after(0.0, call)

    # -- what the scheduler asks ------------------------------------------------------------------

    def as_machine(self) -> Process:
        return self

    def check(self) -> None:
        if self.dead:
            raise Killed(self.name)

    def thread_ended(self, thread: SimThread, error: BaseException | None) -> None:
        if isinstance(error, Killed):
            return
        if thread is self.main:
            self.error = error
            self._end()
        elif error is not None:
            self.world.unexpected.append((self.name, thread.name, error))

    # -- what `paceline.core.runtime` asks --------------------------------------------------------

    def lives(self, number: int) -> bool:
        return any(one.number == number for one in self.machine.processes)

    def monotonic(self) -> float:
        return self.machine.monotonic()

    def wall(self) -> float:
        return EPOCH_S + self.machine.wall_off_s + self.machine.monotonic()

    def living(self, pid: int) -> bool:
        return any(process.pid == pid for process in self.machine.processes)

    def token_hex(self, size: int) -> str:
        return self.world.rng.randbytes(size).hex()

    def sleep(self, seconds: float) -> None:
        self.world.sleep(seconds / self.machine.rate)

    def thread(self, target: Callable[..., object], args: tuple[Any, ...], name: str) -> SimThread:
        return SimThread(self, target, args, name)

    def current_thread(self) -> SimThread:
        return self.world.current

    def lock(self) -> SimLock:
        return SimLock(self.world)

    def rlock(self) -> SimLock:
        return SimLock(self.world, again=True)

    def condition(self, lock: SimLock) -> SimCondition:
        return SimCondition(self.world, lock)

    def event(self) -> SimEvent:
        return SimEvent(self.world)

    def queue(self) -> SimQueue:
        return SimQueue(self.world)

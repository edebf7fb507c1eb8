# SPDX-License-Identifier: Apache-2.0
"""Faults of a simulated run: what may happen, and how often it did."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from devtools.world.network import SimChannel
from devtools.world.process import Process, SimMachine, World

T = TypeVar("T")


class Run(Protocol):
    """What faults happen to."""

    world: World
    workers: dict[int, Process]

    @property
    def control_machine(self) -> SimMachine:
        """The machine of the control plane."""

    @property
    def control(self) -> Process | None:
        """The control plane, if it lives."""

    def join(self) -> object:
        """Start a further worker."""


class Faults:
    """Draws faults until it is told to heal.

    Args:
        run: that they happen to.
        kinds: the faults to draw from, by name.
        without: numbers of faults that are drawn, and left out: the others stay as they are.

    Attributes:
        drawn: how many were drawn.
        counts: how often each kind has happened.
        tape: when and to whom.
        touched: processes and addresses of machines to which something happened that may end a worker.
    """

    def __init__(self, run: Run, kinds: Mapping[str, Callable[[Faults], str]], without: Collection[int] = ()) -> None:
        self.run, self.world = run, run.world
        self._rng = random.Random(0)
        self._healing: list[Callable[[], None]] = []
        self.drawn, self._without = 0, without
        self.counts: Counter[str] = Counter()
        self.tape: list[tuple[float, str]] = []
        self.touched: set[object] = set()
        self._kinds = kinds

    def begin(self, count: int, seconds: float, within_s: float | None = None) -> None:
        """Let `count` faults begin within `within_s`, by default in all the time, and none last beyond `seconds`."""
        rng, self.drawn = self.world.rng, count
        span = seconds if within_s is None else within_s
        for number in range(count):
            kind, when, seed = rng.choice(list(self._kinds)), span * rng.random(), rng.getrandbits(32)
            if number not in self._without:
                self.world.after(when, partial(self._happen, kind, seed))
        self.world.after(seconds, self._heal)

    def also(self, kind: str, when: float, happens: Callable[[], str]) -> None:
        """Let one more happen that is not drawn here, and is not healed."""

        def now() -> None:
            what = happens()
            if what:
                self.counts[kind] += 1
                self.tape.append((self.world.now, f"{kind}: {what}"))

        self.world.after(when, now)

    def _happen(self, kind: str, seed: int) -> None:
        self._rng = random.Random(seed)
        what = self._kinds[kind](self)
        if what:
            self.counts[kind] += 1
            self.tape.append((self.world.now, f"{kind}: {what}"))

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Undo a fault then, or when all is healed."""
        done = [False]

        def once() -> None:
            if not done[0]:
                done[0] = True
                call()

        self._healing.append(once)
        self.world.after(seconds, once)

    def _heal(self) -> None:
        for call in self._healing:
            call()

    def span(self, low: float, high: float) -> float:
        """A number between them, logarithms evenly."""
        return float(low * (high / low) ** self._rng.random())

    def choose(self, among: Sequence[T]) -> T:
        """One of them."""
        return self._rng.choice(among)

    def number(self, low: int, high: int) -> int:
        """From `low` to `high`."""
        return self._rng.randint(low, high)

    # -- kinds ------------------------------------------------------------------------------------

    def _worker(self) -> Process | None:
        living = [one for one in self.run.workers.values() if not one.dead]
        return self._rng.choice(living) if living else None

    def kill_worker(self) -> str:
        one = self._worker()
        if one is not None:
            self.touched.add(one)
            one.kill()
        return one.name if one is not None else ""

    def _kill_control(self) -> None:
        if self.run.control is not None:
            self.run.control.kill()

    def kill_control(self) -> str:
        there = self.run.control is not None
        self._kill_control()
        return "control" if there else ""

    def power_control(self) -> str:
        self.run.control_machine.fail()
        return "control"

    def kill_at_write(self) -> str:
        """The control plane is killed at one of its next operations on the disk."""
        left = self._rng.randint(1, 8)
        self.run.control_machine.disk.armed = (left, self._kill_control)
        return f"at operation {left}"

    def power_at_write(self) -> str:
        """The same with its power."""
        left = self._rng.randint(1, 8)
        self.run.control_machine.disk.armed = (left, self.run.control_machine.fail)
        return f"at operation {left}"

    def power_worker(self) -> str:
        one = self._worker()
        if one is not None:
            self.touched.add(one.address)
            one.machine.fail()
        return one.name if one is not None else ""

    def stop_worker(self) -> str:
        one = self._worker()
        if one is None:
            return ""
        seconds = self.span(0.01, 6.0)
        self.touched.add(one)
        one.stop()
        self.later(seconds, one.go_on)
        return f"{one.name} for {seconds:.2f} s"

    def stop_control(self) -> str:
        one, seconds = self.run.control, self.span(0.01, 6.0)
        if one is None:
            return ""
        one.stop()
        self.later(seconds, one.go_on)
        return f"for {seconds:.2f} s"

    def partition(self) -> str:
        """Between two hosts, one way or both."""
        network, hosts = self.world.network, sorted(self.world.machines)
        if len(hosts) < 2:
            return ""
        one, other = self._rng.sample(hosts, 2)
        self.touched |= {one, other}
        seconds, both = self.span(0.01, 6.0), self._rng.random() < 0.6
        for sender, receiver in [(one, other), (other, one)][: 2 if both else 1]:
            network.cut(sender, receiver)
            self.later(seconds, partial(network.heal, sender, receiver))
        return f"{one} {'<->' if both else '->'} {other} for {seconds:.2f} s"

    def isolate(self) -> str:
        """One host from all others."""
        network, hosts = self.world.network, sorted(self.world.machines)
        one, seconds = self._rng.choice(hosts), self.span(0.01, 6.0)
        self.touched.add(one)
        for other in hosts:
            for sender, receiver in ((one, other), (other, one)):
                if one != other:
                    network.cut(sender, receiver)
                    self.later(seconds, partial(network.heal, sender, receiver))
        return f"{one} for {seconds:.2f} s"

    def reset(self) -> str:
        channels = list(self.world.network.channels)
        if not channels:
            return ""
        one = self._rng.choice(channels)
        self.touched |= {one.host, one.other.host}
        self.world.network.reset(one)
        return f"{one.host} and {one.other.host}"

    def slow_network(self) -> str:
        network, before = self.world.network, self.world.network.slow_s
        network.slow_s = self.span(0.01, 0.5)
        self.later(self.span(0.05, 2.0), lambda: setattr(network, "slow_s", before))
        return f"{network.slow_s:.3f} s"

    def drip(self) -> str:
        """Connections carry 1 to 100 KB/s."""
        network, before = self.world.network, self.world.network.byte_s
        network.byte_s = seconds = self.span(1e-5, 1e-3)
        self.touched |= set(self.world.machines)
        self.later(self.span(0.05, 3.0), lambda: setattr(network, "byte_s", before))
        return f"{1e-3 / seconds:.1f} KB/s"

    def halves(self) -> str:
        """A partition between two parts of the hosts, one way or both."""
        network, hosts = self.world.network, sorted(self.world.machines)
        if len(hosts) < 2:
            return ""
        self._rng.shuffle(hosts)
        cut, seconds, both = self._rng.randint(1, len(hosts) - 1), self.span(0.5, 6.0), self._rng.random() < 0.7
        for one in hosts[:cut]:
            for other in hosts[cut:]:
                for sender, receiver in [(one, other), (other, one)][: 2 if both else 1]:
                    network.cut(sender, receiver)
                    self.later(seconds, partial(network.heal, sender, receiver))
        self.touched |= set(hosts)
        return f"{hosts[:cut]} {'<->' if both else '->'} {hosts[cut:]} for {seconds:.2f} s"

    def kill_at_frame(self) -> str:
        """The sender of one of the next frames is killed, before or after it has left."""
        left, before = int(self.span(1, 200)), self._rng.random() < 0.5

        def kill(channel: SimChannel) -> None:
            process = channel.process
            assert isinstance(process, Process)
            self.touched.add(process)
            self.tape.append((self.world.now, f"killed at a frame: {process.name}"))
            process.kill()

        self.world.network.armed = (left, before, kill)
        return f"number {left}, {'before' if before else 'after'} it"

    def slow_disk(self) -> str:
        disk = self.run.control_machine.disk
        disk.slow_s = self.span(0.01, 2.0)
        seconds = disk.slow_s
        self.later(self.span(0.05, 3.0), lambda: setattr(disk, "slow_s", 0.0))
        return f"{seconds:.3f} s"

    def full_disk(self) -> str:
        disk = self.run.control_machine.disk
        disk.full = True
        self.later(self.span(0.05, 3.0), lambda: setattr(disk, "full", False))
        return "of the control plane"

    def join(self) -> str:
        self.run.join()
        return "a further worker"


KINDS: dict[str, Callable[[Faults], str]] = {
    call.__name__: call
    for call in (
        Faults.kill_worker,
        Faults.kill_control,
        Faults.power_control,
        Faults.kill_at_write,
        Faults.power_at_write,
        Faults.power_worker,
        Faults.stop_worker,
        Faults.stop_control,
        Faults.partition,
        Faults.isolate,
        Faults.reset,
        Faults.slow_network,
        Faults.slow_disk,
        Faults.full_disk,
        Faults.join,
    )
}
"""Of elastic runs, by name."""

SERVER_KINDS: dict[str, Callable[[Faults], str]] = {
    call.__name__: call
    for call in (
        Faults.kill_worker,
        Faults.kill_at_frame,
        Faults.power_worker,
        Faults.stop_worker,
        Faults.partition,
        Faults.isolate,
        Faults.halves,
        Faults.reset,
        Faults.slow_network,
        Faults.drip,
    )
}
"""Of asynchronous runs, by name."""


def chosen(kinds: Mapping[str, Callable[[Faults], str]], names: Sequence[str]) -> Mapping[str, Callable[[Faults], str]]:
    """Those of these names; all if there are none."""
    return {name: kinds[name] for name in names} if names else kinds

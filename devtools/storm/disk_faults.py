# SPDX-License-Identifier: Apache-2.0
"""Faults of the disks that hold steps, of the machines with them, and of clocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from devtools.storm.faults import Faults, Run
from devtools.world.disk import SimDisk

from paceline.checkpoint.files import is_step

MOST_OPERATIONS = 60
"""Within so many operations from now a disk's fault happens."""


class RunWithSteps(Run, Protocol):
    """What these faults happen to."""

    @property
    def disks(self) -> list[SimDisk]:
        """Those with steps."""

    def second_launcher(self) -> None:
        """Start the same training a second time, at the same place."""

    def damaged(self, why: str) -> None:
        """From now on a step that was agreed may be damaged."""


def _run(faults: Faults) -> RunWithSteps:
    return cast(RunWithSteps, faults.run)


def _disk(faults: Faults) -> SimDisk:
    return faults.choose(_run(faults).disks)


def room(faults: Faults) -> str:
    """A disk has room for a few bytes more."""
    disk, seconds = _disk(faults), faults.span(0.05, 3.0)
    disk.room = int(faults.span(1.0, 1e5)) - 1
    left = disk.room
    faults.later(seconds, lambda: setattr(disk, "room", None))
    return f"{left} bytes for {seconds:.2f} s"


def drag(faults: Faults) -> str:
    """A disk is slow."""
    disk, seconds = _disk(faults), faults.span(0.05, 3.0)
    disk.slow_s = slow_s = faults.span(0.01, 1.0)
    faults.later(seconds, lambda: setattr(disk, "slow_s", 0.0))
    return f"{slow_s:.3f} s for {seconds:.2f} s"


def flip(faults: Faults) -> str:
    """A bit of a file of a step flips; in half of the cases one of the newest, and a worker is killed: it is read."""
    disk = _disk(faults)
    files = [file for file in disk.files() if "step-" in file.parent.name]
    if not files:
        return ""
    file, read = faults.choose(files), faults.number(0, 1)
    if read:
        newest = max((one.parent for one in files), key=lambda folder: (is_step(folder), folder))
        file = faults.choose([one for one in files if one.parent == newest])
    disk.flip(file)
    _run(faults).damaged(str(file))
    return f"{file}; killed: {faults.kill_worker() or 'nobody'}" if read else str(file)


def unreadable(faults: Faults) -> str:
    """An operation that reads fails."""
    return _fails(faults, "read")


def unsynced(faults: Faults) -> str:
    """A sync fails, and what it was to keep is lost."""
    return _fails(faults, "sync")


def _fails(faults: Faults, kind: str) -> str:
    disk = _disk(faults)
    disk.failing_after[kind] = after = faults.number(0, 20)
    disk.failing[kind] = 1
    return f"{kind} number {after + 1} from now"


def killed_on_disk(faults: Faults) -> str:
    """All processes of the disk's machine are killed at an operation."""
    return _armed(faults, power=False)


def power_on_disk(faults: Faults) -> str:
    """Power fails at an operation, at all machines that have this disk."""
    return _armed(faults, power=True)


def _armed(faults: Faults, power: bool) -> str:
    disk, left = _disk(faults), faults.number(1, MOST_OPERATIONS)
    machines = [one for one in faults.world.machines.values() if one.disk is disk]

    def now() -> None:
        for machine in machines:
            if power:
                machine.fail()
            else:
                for process in list(machine.processes):
                    process.kill()
        if power:
            disk.fail()

    disk.armed = (left, now)
    return f"at operation {left} of {len(machines)} machines"


def clock_jump(faults: Faults) -> str:
    """The wall clock of a machine is set to another time."""
    machine = faults.choose(list(faults.world.machines.values()))
    jump_s = faults.choose([-1.0, 1.0]) * faults.span(1.0, 1e8)
    machine.wall_off_s += jump_s
    return f"{jump_s:+.0f} s on {machine.name}"


def clock_rate(faults: Faults) -> str:
    """The clock of a machine runs slow or fast."""
    machine = faults.choose(list(faults.world.machines.values()))
    rate = 1.0 + faults.choose([-1.0, 1.0]) * faults.span(1e-5, 1e-2)
    machine.set_rate(rate)
    return f"{rate:.6f} on {machine.name}"


def second_launcher(faults: Faults) -> str:
    """The same training is started a second time."""
    _run(faults).second_launcher()
    return "another run"


OF_DISKS: dict[str, Callable[[Faults], str]] = {
    call.__name__: call for call in (room, drag, flip, unreadable, unsynced, killed_on_disk, power_on_disk)
}
"""By name."""
OF_MACHINES: dict[str, Callable[[Faults], str]] = {
    call.__name__: call for call in (clock_jump, clock_rate, second_launcher)
}
"""By name."""

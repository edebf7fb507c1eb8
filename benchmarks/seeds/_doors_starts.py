# SPDX-License-Identifier: Apache-2.0
"""Starts a door's commands as a person would type them, and reads when each worker had made its first step."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from _doors import PROGRAMS, Door

LOOK_EVERY_S = 0.05
DEADLINE_S = 300.0
MARKS = ("first", "exchange")


class NotStarted(RuntimeError):
    """A door whose workers did not come to their marks; the message has the end of what they printed."""


@dataclass
class Place:
    """Where one start runs.

    Attributes:
        folder: of its output and of what the programs write; new.
        python: the interpreter whose commands are taken.
        environment: beyond this process's.
    """

    folder: Path
    python: str
    environment: dict[str, str]

    def variables(self, stop: bool) -> dict[str, str]:
        """Of the processes. One thread each, so that all doors have as many."""
        marks = self.folder / "marks"
        marks.mkdir(parents=True, exist_ok=True)
        paths = [str(PROGRAMS / "marks"), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        added = {
            "PATH": os.pathsep.join([str(Path(self.python).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "FRONT_DOORS_MARKS": str(marks),
        }
        return {**os.environ, **added, **self.environment, **({"FRONT_DOORS_STOP": "1"} if stop else {})}


class Started:
    """The processes of one start."""

    def __init__(self, door: Door, workers: int, place: Place, stop: bool) -> None:
        self.door, self.count, self.place = door, workers, place
        self.variables = place.variables(stop)
        self.server: subprocess.Popen[bytes] | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self.begun = time.time()
        if door.server is not None:
            self.server = self._run(door.server(workers), "server")
        address = self._address() if door.address else ""
        for number, command in enumerate(door.workers(workers)):
            self.processes.append(self._run(command.replace("{ADDRESS}", address), str(number)))

    def _run(self, command: str, name: str) -> subprocess.Popen[bytes]:
        command = re.sub(r"(\w+\.py)\b", lambda found: shlex.quote(str(PROGRAMS / found[1])), command)
        with (self.place.folder / f"{name}.txt").open("wb") as out:
            return subprocess.Popen(
                ["bash", "-c", f"exec env {command}"],
                cwd=self.place.folder,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _address(self) -> str:
        """What the server says, as soon as it says it."""
        while time.time() < self.begun + DEADLINE_S:
            found = re.search(self.door.address, (self.place.folder / "server.txt").read_text(errors="replace"))
            if found:
                return found[1]
            time.sleep(LOOK_EVERY_S)
        raise NotStarted(self.output())

    def output(self) -> str:
        """What all have printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.place.folder.glob("*.txt")))

    def marks(self) -> dict[str, list[float]]:
        """The times of each mark so far."""
        folder = self.place.folder / "marks"
        return {name: [float(p.read_text()) for p in folder.glob(f"{name}-*") if p.suffix != ".new"] for name in MARKS}

    def ended(self) -> bool:
        """Whether all worker commands have ended; raises where one failed."""
        codes = [process.poll() for process in self.processes]
        if any(codes):
            raise NotStarted(f"{self.door.name}: exit codes {codes}\n{self.output()[-4000:]}")
        return None not in codes

    @property
    def tops(self) -> list[subprocess.Popen[bytes]]:
        """The processes of the commands."""
        return [*self.processes, *([self.server] if self.server else [])]

    def family(self) -> list[psutil.Process]:
        """These, and all below them."""
        found = []
        for top in self.tops:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(top.pid)
                found += [process, *process.children(recursive=True)]
        return found

    def processor_s(self) -> float:
        """Processor seconds of all processes so far."""
        total = 0.0
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        """End everything that this start has left."""
        tops, found = self.tops, self.family()
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        for top in tops:
            top.wait()
        psutil.wait_procs(found, timeout=30)


@contextlib.contextmanager
def started(door: Door, workers: int, place: Place, stop: bool) -> Iterator[Started]:
    """A start, of which nothing is left behind."""
    place.folder.mkdir(parents=True)
    it = Started(door, workers, place, stop)
    try:
        yield it
    finally:
        it.close()


def seconds(door: Door, workers: int, place: Place) -> dict[str, float]:
    """From the launch until the last worker had made its first step, and the step after its first exchange.

    `processor`: the seconds that all processes had computed by the first step, whoever else computes here.
    """
    found: dict[str, float] = {}
    with started(door, workers, place, stop=True) as it:
        while time.time() < it.begun + DEADLINE_S:
            marks = it.marks()
            if "processor" not in found and len(marks["first"]) == workers:
                found["processor"] = round(it.processor_s(), 2)
            if all(len(times) == workers for times in marks.values()):
                return found | {name: round(max(times) - it.begun, 3) for name, times in marks.items()}
            it.ended()
            time.sleep(LOOK_EVERY_S)
        raise NotStarted(f"{door.name}: after {DEADLINE_S:.0f} s {it.marks()}\n{it.output()[-4000:]}")


def trained(door: Door, workers: int, place: Place) -> dict[str, float]:
    """A whole training: the last held-out loss that was printed, and how long it took."""
    with started(door, workers, place, stop=False) as it:
        while not it.ended():
            if time.time() > it.begun + 2 * DEADLINE_S:
                raise NotStarted(f"{door.name}: not over after {2 * DEADLINE_S:.0f} s\n{it.output()[-4000:]}")
            time.sleep(LOOK_EVERY_S)
        took = time.time() - it.begun
        if not (place.folder / "model.pt").exists():
            raise NotStarted(f"{door.name}: no model was saved\n{it.output()[-4000:]}")
        return {"loss": last_loss(it.output()), "seconds": round(took, 1)}


def last_loss(text: str) -> float:
    """The last held-out loss in what was printed."""
    found = re.findall(r"held-out loss (\d+\.\d+)", text)
    if not found:
        raise NotStarted(f"no held-out loss in:\n{text[-4000:]}")
    return float(found[-1])

# SPDX-License-Identifier: Apache-2.0
"""The storm: at random times one fault after another, each written down with when it began and ended."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _faults.cluster import PROGRAM, SOURCES, Cluster, Worker
from _faults.job import read

PAUSE_S = (10.0, 20.0)
SHORT_S, LONG_S = (0.5, 1.7), (2.5, 8.0)  # of a stop or a cut: less and more than the silence that is allowed
LOSS_S = (5.0, 10.0)
LOSS = 0.1
KINDS = ("kill", "stop", "cut", "loss", "nan", "checkpoint", "join")
GUESTS = 2  # hosts that come later
LOOK_S = 0.05


@dataclass
class Fault:
    """Something that was done.

    Attributes:
        kind: what.
        at: when it began, seconds of the wall clock.
        until: when it was over; `at` where it is a moment.
        host: where.
        worker: to whom; -1 for nobody in particular.
        about: further facts.
    """

    kind: str
    at: float
    until: float
    host: int
    worker: int = -1
    about: dict[str, Any] = field(default_factory=dict)


class Storm:
    """Does harm.

    Args:
        cluster: to whom.
        seed: of all that is drawn.
        workers: that are there from the beginning; hosts that come later have the numbers behind theirs.
        kinds: of faults.
        launcher_s: when host 0's launcher is killed, seconds from the beginning; None for never.
    """

    def __init__(
        self, cluster: Cluster, seed: int, workers: int, kinds: tuple[str, ...] = KINDS, launcher_s: float | None = None
    ) -> None:
        self.cluster, self.random = cluster, random.Random(seed)
        self.kinds, self.launcher_s, self.workers = kinds, launcher_s, workers
        self.faults: list[Fault] = []
        self.alive: set[int] = set()  # workers that the end of the measurement cuts off
        self._open: list[tuple[float, Fault, Callable[[], None]]] = []  # what ends by itself, and when
        self._deck: list[str] = []
        self._guests: list[int] = []
        self._checks: list[tuple[Fault, subprocess.Popen[str]]] = []

    def blow(self, calm: Callable[[], bool]) -> None:
        """Until `calm` says so; the first fault comes when all train."""
        begun, due, launcher_due = time.monotonic(), float("inf"), self.launcher_s
        while not calm():
            now = time.monotonic()
            if due == float("inf") and len(self.cluster.training()) >= self.workers:
                due = now + self.random.uniform(*PAUSE_S)
            self._close(now)
            if launcher_due is not None and now - begun > launcher_due:
                launcher_due = None
                self._launcher()
            elif now >= due:
                self._strike()
                due = now + self.random.uniform(*PAUSE_S)
            time.sleep(LOOK_S)
        self._close(float("inf"))
        self._finish_checks()

    def _strike(self) -> None:
        """One fault; kinds come in turns of random order, so that none is missing in a short storm."""
        if not self._deck:
            self._deck = self.random.sample(self.kinds, len(self.kinds))
        kind = self._deck.pop()
        if not getattr(self, f"_{kind}")():
            self._deck.insert(0, kind)  # nobody to whom it could be done now

    def _victim(self, where: Callable[[Worker], bool] = lambda worker: True) -> Worker | None:
        """Somebody who trains, and to whom nothing else happens at present."""
        busy = {fault.host for _, fault, _ in self._open}
        found = [one for one in self.cluster.training() if one.host not in busy and where(one)]
        return self.random.choice(found) if found else None

    def _did(self, kind: str, host: int, worker: int = -1, **about: Any) -> Fault:
        now = time.time()
        self.faults.append(Fault(kind, now, now, host, worker, about))
        print(f"{time.strftime('%H:%M:%S')}  {kind} host {host} worker {worker} {about or ''}", flush=True)
        return self.faults[-1]

    def _until(self, seconds: float, fault: Fault, end: Callable[[], None]) -> None:
        fault.about["for_s"] = round(seconds, 2)
        self._open.append((time.monotonic() + seconds, fault, end))

    def _away_s(self) -> float:
        """Half of the stops and cuts are survived."""
        return self.random.uniform(*self.random.choice((SHORT_S, LONG_S)))

    def _close(self, now: float) -> None:
        for one in [one for one in self._open if one[0] <= now]:
            self._open.remove(one)
            one[2]()
            one[1].until = time.time()

    # -- what can happen --------------------------------------------------------------------------

    def _kill(self) -> bool:
        if (victim := self._victim()) is None:
            return False
        self._did("kill", victim.host, victim.number)
        victim.signal(signal.SIGKILL)
        return True

    def _stop(self) -> bool:
        if (victim := self._victim()) is None:
            return False
        fault = self._did("stop", victim.host, victim.number)
        victim.signal(signal.SIGSTOP)
        self._until(self._away_s(), fault, lambda: victim.signal(signal.SIGCONT))
        return True

    def _cut(self) -> bool:
        """Never of host 0, which has the control plane: there the fault is the launcher's death."""
        network = self.cluster.network
        if network is None or (victim := self._victim(lambda one: one.host > 0)) is None:
            return False
        fault = self._did("cut", victim.host, victim.number)
        network.cut(victim.host)
        self._until(self._away_s(), fault, lambda: network.mend(victim.host))
        return True

    def _loss(self) -> bool:
        network = self.cluster.network
        if network is None or (victim := self._victim()) is None:
            return False
        fault = self._did("loss", victim.host, victim.number, share=LOSS)
        network.lose(victim.host, LOSS)
        self._until(self.random.uniform(*LOSS_S), fault, lambda: network.lose(victim.host, 0.0))
        return True

    def _nan(self) -> bool:
        if (victim := self._victim()) is None:
            return False
        self._did("nan", victim.host, victim.number)
        (Path(self.cluster.job.books) / f"poison-{victim.number}").touch()
        return True

    def _checkpoint(self) -> bool:
        """A byte of the newest step is flipped; a program that starts now has to take the one before."""
        kept = Path(self.cluster.job.checkpoint) if self.cluster.job.checkpoint else None
        steps = sorted(path for path in kept.glob("step-*") if path.is_dir() and "." not in path.name) if kept else []
        if len(steps) < 2:
            return False
        files = [path for path in sorted(steps[-1].iterdir()) if path.suffix == ".safetensors"]
        if not files:
            return False
        copy = self.cluster.directory / f"damaged-{len(self.faults)}"
        try:
            path, place = flip(self.random.choice(files), self.random.random())
            for step in steps[-2:]:  # the run goes on, and removes old steps
                shutil.copytree(step, copy / step.name)
        except FileNotFoundError:  # it has just done so
            return False
        about = {"newest": steps[-1].name, "before": steps[-2].name, "file": path.name, "byte": place}
        self._checks.append((self._did("checkpoint", 0, -1, **about), self._resume(copy)))
        return True

    def _resume(self, steps: Path) -> subprocess.Popen[str]:
        job = read(self.cluster.job_file)
        job.checkpoint = str(steps)
        file = job.write(steps.with_suffix(".json"))
        return subprocess.Popen(
            [sys.executable, "-W", "always", str(PROGRAM), str(file), "resume"],
            env={"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _finish_checks(self) -> None:
        """Which steps the starts have taken, and what they said of the damaged ones."""
        for fault, process in self._checks:
            said, _ = process.communicate(timeout=60)
            found = [line for line in said.splitlines() if line.startswith("RESUMED ")]
            step = json.loads(found[-1].removeprefix("RESUMED "))["step"] if found else ""
            fault.about |= {"resumed_at": step, "named": fault.about["newest"] in said, "said": said[-600:]}
            fault.about["right"] = step == fault.about["before"]

    def _join(self) -> bool:
        """A further host comes; if both are here, one of them goes."""
        vacant = [host for host in range(self.workers, self.workers + GUESTS) if host not in self._guests]
        if not vacant:
            return self._leave()
        self._guests.append(vacant[0])
        self._did("join", vacant[0])
        self.cluster.start(vacant[0])
        return True

    def _leave(self) -> bool:
        host = self._guests.pop(0)
        how = self.random.choice((signal.SIGTERM, signal.SIGKILL))
        workers = [one for one in self.cluster.training() if one.host == host]
        self._did("leave", host, workers[0].number if workers else -1, how=how.name)
        launcher = self.cluster.launchers.pop(host)
        launcher.send_signal(how)
        if how == signal.SIGKILL:  # whoever kills a launcher leaves its workers; a host that dies has neither
            for worker in workers:
                worker.signal(signal.SIGKILL)
        launcher.wait()
        return True

    def _launcher(self) -> None:
        self._did("launcher", 0)
        launcher = self.cluster.launchers[0]
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        self.cluster.again()

    def write(self, path: Path) -> None:
        """The log."""
        path.write_text("\n".join(json.dumps(asdict(fault)) for fault in self.faults) + "\n")


def flip(path: Path, where: float) -> tuple[Path, int]:
    """Flip a bit of a byte in the later nine tenths of a file; which one."""
    size = path.stat().st_size
    place = min(size - 1, size // 10 + int(where * size * 0.9))
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))
    return path, place

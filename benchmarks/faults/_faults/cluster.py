# SPDX-License-Identifier: Apache-2.0
"""One training on several hosts: their launchers, and the workers that live at the moment.

Host 0's launcher has the control plane. All hosts are network namespaces of this machine, or, without a network, this
machine itself with all workers under one launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devtools.emulation import EmulatedNetwork

from _faults.job import Job

PROGRAM = Path(__file__).with_name("program.py")
SOURCES = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(PROGRAM.parents[3] / "src")]))
PORT = 29600
FEWEST, MOST = 2, 8
POLL_S = 0.05
READY_S = 60.0  # for host 0's launcher


@dataclass(frozen=True)
class Worker:
    """A worker that has begun to train.

    Attributes:
        number: of the worker, never used twice.
        pid: of its process.
        host: where it runs.
    """

    number: int
    pid: int
    host: int

    @property
    def lives(self) -> bool:
        """Whether its process does."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    def signal(self, which: signal.Signals) -> None:
        """Send its process a signal, if it is there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, which)


class Cluster:
    """The launchers of one training.

    Args:
        directory: for everything that it leaves.
        job: what is trained.
        network: of the hosts; None for one host.
    """

    def __init__(self, directory: Path, job: Job, network: EmulatedNetwork | None = None) -> None:
        self.directory, self.job, self.network = directory, job, network
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        directory.mkdir(parents=True, exist_ok=True)
        Path(job.books).mkdir(parents=True, exist_ok=True)
        self.job_file = job.write(directory / "job.json")
        self._read: dict[Path, tuple[int, list[dict[str, Any]]]] = {}
        self._turns = 0

    # -- launchers --------------------------------------------------------------------------------

    def log(self, host: int) -> Path:
        """The log directory of a host's launcher."""
        return self.directory / f"host-{host}"

    @property
    def address(self) -> str:
        """Where the control plane listens."""
        return f"{self.network.address(0) if self.network else '127.0.0.1'}:{PORT}"

    def start(self, host: int, workers: int = 1) -> None:
        """The launcher of a host."""
        log = self.log(host)
        while log.exists():  # of one that was here before
            self._turns += 1
            log = self.directory / f"host-{host}.{self._turns}"
        place = ["--elastic", f"{FEWEST}:{MOST}", "--listen", self.address] if host == 0 else ["--join", self.address]
        options = [*place, "--workers", str(workers), "--timeout", f"{self.job.timeout_s:g}", "--log", str(log)]
        self._launch(host, [*options, *self._credentials(host), str(PROGRAM), str(self.job_file)])

    def again(self) -> None:
        """Host 0's launcher once more, after it was killed."""
        self._launch(0, ["--again", str(self.log(0))])

    def _credentials(self, host: int) -> list[str]:
        """A guest needs the job's secret, which host 0's launcher makes; here they share a disk."""
        if host == 0:
            return []
        secret, until = self.log(0) / "certificates" / "job.pem", time.monotonic() + READY_S
        while not secret.exists():
            if time.monotonic() > until:
                raise SystemExit(f"host 0's launcher made no {secret} within {READY_S:g} s; {self.tail()}")
            time.sleep(POLL_S)
        return ["--job", str(secret)]

    def _launch(self, host: int, arguments: list[str], command: str = "run") -> None:
        prefix = self.network.prefix(host) if self.network else []
        added = {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCES}
        with (self.directory / f"launcher-{host}.txt").open("ab") as out:
            self.launchers[host] = subprocess.Popen(
                [*prefix, sys.executable, "-m", "paceline", command, "--quiet", *arguments],
                env={**os.environ, **added},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def wait(self, deadline_s: float) -> dict[int, int]:
        """Until all launchers have ended; their exit codes.

        Raises:
            SystemExit: they did not.
        """
        until = time.monotonic() + deadline_s
        while any(one.poll() is None for one in self.launchers.values()):
            if time.monotonic() > until:
                running = sorted(host for host, one in self.launchers.items() if one.poll() is None)
                raise SystemExit(f"after {deadline_s:.0f} s the launchers of hosts {running} still run; {self.tail()}")
            time.sleep(POLL_S)
        return {host: one.wait() for host, one in self.launchers.items()}

    def tail(self) -> str:
        """What the launchers said last."""
        said = {path.name: path.read_text(errors="replace")[-1500:] for path in self.directory.glob("launcher-*.txt")}
        return "\n".join(f"--- {name}\n{text}" for name, text in sorted(said.items()))

    def close(self) -> None:
        """End what still runs."""
        for one in self.launchers.values():
            if one.poll() is None:
                one.send_signal(signal.SIGKILL)
                one.wait()
        for worker in self.begun():
            worker.signal(signal.SIGKILL)

    # -- workers ----------------------------------------------------------------------------------

    def lines(self, path: Path) -> list[dict[str, Any]]:
        """The lines of a growing file, read where the last look ended."""
        place, found = self._read.get(path, (0, []))
        if path.exists():
            with path.open("rb") as file:
                file.seek(place)
                text = file.read()
            whole = text.rfind(b"\n") + 1
            found += [json.loads(line) for line in text[:whole].splitlines()]
            place += whole
        self._read[path] = place, found
        return found

    def books(self) -> dict[int, list[dict[str, Any]]]:
        """What each worker has written down."""
        paths = sorted(Path(self.job.books).glob("worker-*.jsonl"))
        return {int(path.stem.split("-")[1]): self.lines(path) for path in paths}

    def begun(self) -> list[Worker]:
        """All workers that ever began."""
        found = []
        for number, lines in self.books().items():
            started = [line for line in lines if line["event"] == "started"]
            if started:
                host = started[-1]["host"]
                found.append(Worker(number, started[-1]["pid"], int(host[4:]) if host[:4] == "host" else 0))
        return found

    def training(self) -> list[Worker]:
        """Those that train now."""
        over = {n for n, lines in self.books().items() if any(line["event"] == "through" for line in lines)}
        return [worker for worker in self.begun() if worker.number not in over and worker.lives]

    def events(self) -> list[dict[str, Any]]:
        """What the control plane told; `at` is in seconds of the wall clock."""
        plan = self.log(0) / "elastic.json"
        if not plan.exists():
            return []
        since = json.loads(plan.read_text())["plan"]["unix_s"]
        return [{**line, "at": since + line["at_s"]} for line in self.lines(self.log(0) / "control.jsonl")]

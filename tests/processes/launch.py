# SPDX-License-Identifier: Apache-2.0
"""Starts N real processes as a launcher would, with a deadline, and collects what they said."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.nursery import Child, nursery, surroundings
from tests.ports import free_port

DEADLINE_S = 200.0
"""More than the 180 s after which the programs say where they hang."""


@dataclass
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str


class Launch:
    """N processes that run one of the programs in :mod:`tests.processes.programs`, or in another module.

    Each is a session of its own, so that nothing survives the test. `place` gives for each rank what stands in front of
    its command, and what it has in its environment.
    """

    def __init__(
        self,
        program: str,
        workers: int,
        directory: Path,
        *arguments: str,
        module: str = "programs",
        place: Callable[[int], tuple[list[str], dict[str, str]]] = lambda rank: ([], {}),
    ) -> None:
        self.directory = directory
        environment = {
            **surroundings(),
            "WORLD_SIZE": str(workers),
            "LOCAL_WORLD_SIZE": str(workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self._module, self._arguments = f"tests.processes.{module}", [program, str(directory), *arguments]
        self.processes: list[subprocess.Popen[bytes] | Child] = []
        for rank in range(workers):
            prefix, more = place(rank)
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), **more}
            self.processes.append(self._start(rank, prefix, own))

    def _start(self, rank: int, prefix: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes] | Child:
        files = self.directory / f"out.{rank}", self.directory / f"err.{rank}"
        if not prefix:
            return nursery().start(self._module, self._arguments, environment, self.directory, *files)
        command = [*prefix, sys.executable, "-m", self._module, *self._arguments]
        with files[0].open("w") as out, files[1].open("w") as err:
            return subprocess.Popen(
                command, env=environment, stdout=out, stderr=err, cwd=self.directory, start_new_session=True
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def until(self, name: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until a program has written the file `name`."""
        end = time.monotonic() + deadline_s
        while not (self.directory / name).exists():
            assert time.monotonic() < end, f"{name} did not appear: {self.said()}"
            assert any(p.poll() is None for p in self.processes), self.said()
            time.sleep(0.02)

    def wait(self, ranks: list[int] | None = None, deadline_s: float = DEADLINE_S) -> dict[int, Ended]:
        """How the processes ended; fails where one does not end by the deadline."""
        end = time.monotonic() + deadline_s
        found = {}
        for rank in range(len(self.processes)) if ranks is None else ranks:
            try:
                code = self.processes[rank].wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} did not end within {deadline_s} s: {self.said()}") from None
            found[rank] = Ended(code, self._read("out", rank), self._read("err", rank))
        return found

    def _read(self, kind: str, rank: int) -> str:
        return (self.directory / f"{kind}.{rank}").read_text()

    def said(self) -> str:
        """The end of everybody's error stream."""
        return "\n".join(f"rank {r}: {self._read('err', r)[-1500:]}" for r in range(len(self.processes)))


def run(program: str, workers: int, directory: Path, *arguments: str, module: str = "programs") -> dict[int, Ended]:
    """Run to the end; every process must end well."""
    with Launch(program, workers, directory, *arguments, module=module) as launch:
        ended = launch.wait()
        assert all(one.code == 0 for one in ended.values()), launch.said()
        return ended

# SPDX-License-Identifier: Apache-2.0
"""An elastic run of real processes, with its control plane in this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.control import Control, Terms
from paceline.transport.tls import TLS

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 90.0


class Cluster:
    """A control plane, and workers that run :mod:`tests.elastic.program`.

    Args:
        directory: for all files.
        terms: of the control plane.
        tls: of all connections.
        phase: of the program; see there.
    """

    def __init__(self, directory: Path, terms: Terms, tls: TLS | None = None, folder: Path | None = None, **phase: Any):
        self.directory, self.folder = directory, folder
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.books = directory / "books"
        self.books.mkdir()
        self.phase = directory / "phase.json"
        self.phase.write_text(json.dumps({"books": str(self.books), "timeout": terms.timeout_s, **phase}))
        self.control = Control("127.0.0.1", 0, tls, terms, directory / "control.json", self._told)
        self.control.start()
        self.processes: list[subprocess.Popen[bytes]] = []

    def _told(self, kind: str, about: dict[str, Any]) -> None:
        self.events.append((kind, about))

    def start(self, workers: int) -> None:
        """Start so many more."""
        for _ in range(workers):
            number = len(self.processes)
            environment = {
                **{k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "PYTEST_"))},
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                "PACELINE_CONTROL": f"127.0.0.1:{self.control.port}",
                "PACELINE_LOG": str(self.directory / "log"),
                "OMP_NUM_THREADS": "1",
            }
            if self.folder is not None:
                environment["PACELINE_TLS"] = str(self.folder)
            command = [sys.executable, "-m", "tests.elastic.program", str(self.phase)]
            with self.file(number, "out").open("w") as out, self.file(number, "err").open("w") as err:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)
                )

    def file(self, number: int, what: str) -> Path:
        """What a process printed."""
        return self.directory / f"{number}.{what}"

    def until(self, what: Callable[[], Any], why: str) -> Any:
        """Wait for something."""
        end = time.monotonic() + DEADLINE_S
        while not (found := what()):
            assert time.monotonic() < end, f"{why}: {self.events[-5:]}, {self.said()}"
            time.sleep(0.02)
        return found

    def saw(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [about for one, about in self.events if one == kind]

    def finish(self) -> list[dict[str, Any] | None]:
        """Wait for all; what each ended with, None for one that was killed or failed."""
        found: list[dict[str, Any] | None] = []
        for number, process in enumerate(self.processes):
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{number} does not end: {self.events[-8:]}, {self.said()}") from None
            text = self.file(number, "out").read_text()
            found.append(json.loads(text.split("ENDED", 1)[1]) if "ENDED" in text else None)
        return found

    def said(self) -> list[str]:
        """The last words of every process."""
        return [self.file(number, "err").read_text()[-1500:] for number in range(len(self.processes))]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.control.close()

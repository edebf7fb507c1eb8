# SPDX-License-Identifier: Apache-2.0
"""An elastic run of real processes, with its control plane in this one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.control import Control, Terms
from paceline.transport.tls import TLS

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 90.0


class Nursery:
    """The parent of all workers; see :mod:`tests.elastic.nursery`."""

    def __init__(self) -> None:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "PYTEST_"))},
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.elastic.nursery"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.codes: dict[int, int] = {}
        self._pids: list[int] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            with self._news:
                if "pid" in said:
                    self._pids.append(said["pid"])
                elif "ended" in said:
                    self.codes[said["ended"]] = said["code"]
                self._news.notify_all()

    def start(self, environment: dict[str, str], phase: Path, out: Path) -> int:
        """Fork one worker; its number."""
        assert self._process.stdin is not None
        with self._news:
            before = len(self._pids)
            order = {"environment": environment, "phase": str(phase), "out": str(out)}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            assert self._news.wait_for(lambda: len(self._pids) > before, DEADLINE_S), "the nursery does not answer"
            return self._pids[-1]

    def wait(self, pid: int) -> int | None:
        """How it ended; None where it does not."""
        with self._news:
            self._news.wait_for(lambda: pid in self.codes, DEADLINE_S)
            return self.codes.get(pid)

    def close(self) -> None:
        """End it and all that it has started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._reader.join()
        self._process.stdout.close()


class Cluster:
    """A control plane, and workers that run :mod:`tests.elastic.program`.

    Args:
        nursery: the workers' parent.
        directory: for all files.
        terms: of the control plane.
        folder: certificates of all connections, or None.
        phase: of the program; see there.
    """

    def __init__(
        self, nursery: Nursery, directory: Path, terms: Terms, folder: Path | None = None, **phase: Any
    ) -> None:
        self.nursery, self.directory, self.folder, self.terms = nursery, directory, folder, terms
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.books = directory / "books"
        self.books.mkdir()
        self.samples = int(phase.get("samples", 400))
        self.phase = directory / "phase.json"
        self.phase.write_text(json.dumps({"books": str(self.books), "timeout": terms.timeout_s, **phase}))
        self.control = self.serve(0)
        self.pids: list[int] = []

    def serve(self, port: int) -> Control:
        """Start a control plane, from its record where there is one."""
        tls = TLS.folder(self.folder) if self.folder is not None else None
        control = Control("127.0.0.1", port, tls, self.terms, self.directory / "control.json", self._told)
        control.start()
        return control

    def _told(self, kind: str, about: dict[str, Any]) -> None:
        self.events.append((kind, {**about, "t": round(time.monotonic() % 1000, 2)}))

    def start(self, workers: int) -> None:
        """Start so many more."""
        for _ in range(workers):
            environment = {
                "PACELINE_CONTROL": f"127.0.0.1:{self.control.port}",
                "PACELINE_LOG": str(self.directory / "log"),
            }
            if self.folder is not None:
                environment["PACELINE_TLS"] = str(self.folder)
            self.pids.append(self.nursery.start(environment, self.phase, self.file(len(self.pids))))

    def file(self, number: int) -> Path:
        """What a process printed."""
        return self.directory / f"{number}.out"

    def until(self, what: Callable[[], Any], why: str) -> Any:
        """Wait for something."""
        end = time.monotonic() + DEADLINE_S
        while not (found := what()):
            assert time.monotonic() < end, f"{why}: {self.events[-5:]}, {self.said()}"
            time.sleep(0.01)
        return found

    def exchanged(self, count: int) -> None:
        """Wait until so many exchanges count."""
        self.until(lambda: self.control.status()["exchange"] >= count, f"there are no {count} exchanges")

    def saw(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [about for one, about in self.events if one == kind]

    def finish(self) -> list[dict[str, Any] | None]:
        """Wait for all; what each ended with, None for one that was killed or failed."""
        found: list[dict[str, Any] | None] = []
        for number, pid in enumerate(self.pids):
            assert self.nursery.wait(pid) is not None, f"{number} does not end: {self.events[-8:]}, {self.said()}"
            text = self.file(number).read_text()
            said = [line for line in text.splitlines() if line.startswith("ENDED {")]
            found.append(json.loads(said[0][6:]) if said else None)
        return found

    def said(self) -> list[str]:
        """The last words of every process."""
        return [self.file(number).read_text()[-1500:] for number in range(len(self.pids))]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.pids:
            if pid not in self.nursery.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        self.control.close()

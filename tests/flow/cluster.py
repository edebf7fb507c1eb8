# SPDX-License-Identifier: Apache-2.0
"""An elastic run of real processes, with its control plane in this one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.communication.sockets.tls import TLS
from paceline.flow.control.messages import Terms
from paceline.flow.control.server import ControlServer
from tests.nursery import Child, nursery, surroundings

DEADLINE_S = 90.0


def terms(expected: int, **more: Any) -> Terms:
    """Of a control plane: a worker may be alone."""
    return Terms(
        **{"min_workers": 1, "max_workers": 16, "timeout_s": 40.0, "expected": expected, "start_s": 40.0, **more}
    )


class Cluster:
    """A control plane, and workers that run :mod:`tests.flow.program`.

    Args:
        directory: for all files.
        terms: of the control plane.
        folder: certificates of all connections, or None.
        phase: of the program; see there.
    """

    def __init__(self, directory: Path, terms: Terms, folder: Path | None = None, **phase: Any) -> None:
        self.directory, self.folder, self.terms = directory, folder, terms
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.books = directory / "books"
        self.books.mkdir()
        self.samples = int(phase.get("samples", 400))
        self.phase = directory / "phase.json"
        self.phase.write_text(json.dumps({"books": str(self.books), "timeout": terms.timeout_s, **phase}))
        self.control = self.serve(0)
        self.children: list[Child] = []

    def serve(self, port: int) -> ControlServer:
        """Start a control plane, from its record where there is one."""
        tls = TLS.folder(self.folder) if self.folder is not None else None
        control = ControlServer("127.0.0.1", port, tls, self.terms, self.directory / "control.json", self._told)
        control.start()
        return control

    def _told(self, kind: str, about: dict[str, Any]) -> None:
        self.events.append((kind, {**about, "t": round(time.monotonic() % 1000, 2)}))

    def start(self, workers: int) -> None:
        """Start so many more."""
        for _ in range(workers):
            environment = {
                **surroundings(),
                "PACELINE_CONTROL": f"127.0.0.1:{self.control.port}",
                "PACELINE_LOG": str(self.directory / "log"),
            }
            if self.folder is not None:
                environment["PACELINE_TLS"] = str(self.folder)
            out = self.file(len(self.children))
            what = "tests.flow.program", [str(self.phase)], environment, self.directory
            self.children.append(nursery().start(*what, out, out))

    @property
    def pids(self) -> list[int]:
        """Of all that were started, in their order."""
        return [child.pid for child in self.children]

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

    def joined(self, more: int, total: int) -> None:
        """Start so many more, wait until all have come, and let them train on."""
        self.start(more)
        self.until(lambda: len(self.saw("joined")) == total, "nobody joins")
        (self.books / "go").touch()

    def saw(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [about for one, about in self.events if one == kind]

    def finish(self) -> list[dict[str, Any] | None]:
        """Wait for all; what each ended with, None for one that was killed or failed."""
        found: list[dict[str, Any] | None] = []
        for number, child in enumerate(self.children):
            try:
                child.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{number} does not end: {self.events[-8:]}, {self.said()}") from None
            text = self.file(number).read_text()
            said = [line for line in text.splitlines() if line.startswith("ENDED {")]
            found.append(json.loads(said[0][6:]) if said else None)
        return found

    def said(self) -> list[str]:
        """The last words of every process."""
        return [self.file(number).read_text()[-1500:] for number in range(len(self.children))]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self.children:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        self.control.close()

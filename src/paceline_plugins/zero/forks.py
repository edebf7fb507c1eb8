# SPDX-License-Identifier: Apache-2.0
"""Workers that a fork server starts: torch is loaded once a host, while the launcher checks what was asked for."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from paceline.core import parent_death

ZERO_LINES = (sys.executable, "-u", "-m", "paceline_plugins.zero")
"""How a worker with zero lines begins, before the program's name."""
SERVER = "paceline_plugins.zero.fork_server"
END_S = 5.0
"""Seconds for the server, and for a killed worker, to end."""
START_S = 600.0
"""Seconds for the server to load torch."""
FAILED = 1


class ForkServer:
    """The process that loads torch and forks workers.

    Args:
        variables: beyond this process's: those that Python and its libraries read when they are loaded.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(START_S)
        # What it prints: nothing, unless torch cannot be loaded.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._lock = threading.RLock()
        self._rest = b""
        self._workers: list[ForkedWorker] = []
        self.ended = False
        with theirs:
            command = [sys.executable, "-u", "-m", SERVER, str(theirs.fileno())]
            self._process = subprocess.Popen(
                [*parent_death.starter(), *command],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> ForkedWorker:
        """Have a worker started, as soon as torch is loaded.

        Args:
            arguments: the whole command, from `ZERO_LINES` on.
            environment: its variables.
            out, err: files for its output.
        """
        with self._lock:
            worker = ForkedWorker(self, Path(err.name))
            self._workers.append(worker)
            about = {"worker": len(self._workers) - 1, "command": list(arguments), "program": len(ZERO_LINES)}
            data = json.dumps({**about, "environment": dict(environment)}).encode()
            try:
                socket.send_fds(self._connection, [len(data).to_bytes(4, "big")], [out.fileno(), err.fileno()])
                self._connection.sendall(data)
            except OSError:
                self._over()
            return worker

    def look(self, seconds: float) -> None:
        """Read what the server has said, after at most so many seconds."""
        with self._lock:
            if self.ended or not select.select([self._connection], [], [], seconds)[0]:
                return
            try:
                data = self._connection.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self._over()
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                about = json.loads(line)
                worker = self._workers[about["worker"]]
                worker.number, worker.returncode = about.get("pid", worker.number), about.get("code")

    def _over(self) -> None:
        """It has ended, and with it all workers."""
        self.ended = True
        self._said.seek(0)
        said = self._said.read()
        for worker in self._workers:
            worker.server_ended(said)

    def close(self) -> None:
        """End it."""
        self._connection.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # it still loads torch
            self.kill()
        self._said.close()

    def kill(self) -> None:
        """Kill it, and with it all workers that have not started."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)


class ForkedWorker:
    """A worker, as `subprocess.Popen` shows one.

    Args:
        server: that starts it.
        errors: file of what it prints on stderr.
    """

    def __init__(self, server: ForkServer, errors: Path) -> None:
        self._server, self._errors = server, errors
        self.returncode: int | None = None  # its exit code; None while it runs
        self.number: int | None = None  # its process, once it has been started

    @property
    def pid(self) -> int:
        """Its process; waits for its start.

        Raises:
            ProcessLookupError: it was never started.
        """
        until = time.monotonic() + START_S
        while self.number is None:
            if self._server.ended or time.monotonic() > until:
                raise ProcessLookupError("the worker was never started")
            self._server.look(1.0)
        return self.number

    def call_off(self) -> None:
        """Never start it, if it has not been started."""
        self.poll()
        if self.number is None:
            self._server.kill()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None:
            self._server.look(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
            self._server.look(0.1)
        return code

    def server_ended(self, said: bytes) -> None:
        """The server has ended, having printed this."""
        if self.returncode is not None:
            return
        self.returncode = FAILED if self.number is None else -int(signal.SIGKILL)
        if self.number is None:
            with contextlib.suppress(OSError), self._errors.open("ab") as file:
                file.write(said)


@contextlib.contextmanager
def fork_server(variables: Mapping[str, str] | None) -> Iterator[ForkServer | None]:
    """A fork server; None where workers have to be executed: without `variables`, and on other systems than Linux.

    Args:
        variables: as of `ForkServer`.
    """
    if variables is None or sys.platform != "linux":
        yield None
        return
    server = ForkServer(variables)
    try:
        yield server
    finally:
        server.close()

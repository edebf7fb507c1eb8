# SPDX-License-Identifier: Apache-2.0
"""Loads torch once a host, then forks the workers of a program with zero lines: `python -m ...fork_server SOCKET`.

Loading torch takes each worker seconds. A forked worker has it loaded already, shares the memory of its code, and then
runs the program as `python -m paceline_plugins.zero` does. The launcher sends a request for each worker: its number,
its command and where in it the program is, its environment, and the two files of its output. It gets
`{"worker": n, "pid": p}` and later `{"worker": n, "code": c}`. The server ends with the launcher's end of the socket,
and its workers with it.

A fork copies no thread but the one that forks. So where a library has started threads, a worker is executed anew, and
loads torch itself. OpenBLAS is the exception: it stops its threads at a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from paceline.core.parent_death import request_death_signal

LOADED = ("paceline_plugins.zero.program", "paceline.run.attach", "torch.distributed", "torch._dynamo")
"""Modules that each worker needs; torch imports the last one with the first optimizer."""
HEAD = 4
"""Bytes of a request's length."""


class ForkServer:
    """Forks workers as the launcher asks for them.

    Args:
        connection: to the launcher.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._workers: dict[int, int] = {}  # pid -> number
        self._forks, self._pid = _forks_alone(), os.getpid()

    def serve(self) -> list[str] | None:
        """Serve until the launcher is gone: None. In a worker: the program and its arguments."""
        wake, woken = socket.socketpair()
        for one in (wake, woken):
            one.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while (request := self._next(woken)) is not None:
            ready, leads = os.pipe()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                for one in (wake, woken, self._connection):
                    one.close()
                for file in (ready, leads):
                    os.close(file)
                return self._become(*request)
            for file in (leads, *request[1]):
                os.close(file)
            os.read(ready, 1)  # its end: the worker leads its session, so that signals to that arrive
            os.close(ready)
            self._workers[pid] = request[0]["worker"]
            self._tell(worker=request[0]["worker"], pid=pid)
        return None

    def _next(self, woken: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
        """The next request and its files; None if the launcher is gone. Reports workers that end meanwhile."""
        while True:
            readable, _, _ = select.select([self._connection, woken], [], [])
            if woken in readable:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
                self._reap()
            if self._connection in readable:
                return receive(self._connection)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in self._workers:
                    self._tell(worker=self._workers.pop(pid), code=os.waitstatus_to_exitcode(status))

    def _tell(self, **about: int) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: the next look at the connection ends this process
            self._connection.sendall(json.dumps(about).encode() + b"\n")

    def _become(self, request: dict[str, Any], files: list[int]) -> list[str]:
        """Be the worker that was asked for."""
        request_death_signal()
        if os.getppid() != self._pid:  # it ended before the request
            os._exit(128 + signal.SIGKILL)
        for number, file in enumerate(files, 1):
            os.dup2(file, number)
            os.close(file)
        command, environment = list(request["command"]), request["environment"]
        if not self._forks:
            os.execve(command[0], command, environment)
        os.environ.clear()
        os.environ.update(environment)
        sys.orig_argv = command
        if "numpy" in sys.modules:  # else all would draw alike
            sys.modules["numpy"].random.seed()
        return command[request["program"] :]


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """A request and its files; None if the other end is closed."""
    head, files, _, _ = socket.recv_fds(connection, HEAD, 2)
    length = int.from_bytes(head, "big")
    data = bytearray()
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            return None
        data += more
    return (json.loads(data), files) if len(head) == HEAD else None


def _forks_alone() -> bool:
    """Whether a forked worker has all threads that this process has: there is no other, but for OpenBLAS's."""
    if _threads() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return _threads() == 1


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def main(arguments: Sequence[str]) -> None:
    """Serve the socket with this number, and run the program in each worker."""
    connection = socket.socket(fileno=int(arguments[0]))
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that the collector of a worker does not copy what all share
    request = ForkServer(connection).serve()
    if request is not None:
        from paceline_plugins.zero.program import main as run

        run(request)


if __name__ == "__main__":
    main(sys.argv[1:])

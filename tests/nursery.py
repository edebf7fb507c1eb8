# SPDX-License-Identifier: Apache-2.0
"""Processes that start at once: a parent that has imported torch and paceline forks them.

To import them takes a process longer than most tests take. The parent starts no thread and no group; what it forks runs
a module as `python -m MODULE ARGUMENTS` would, in a session, a directory and an environment of its own, and ends as an
interpreter ends. The parent is `python -m tests.nursery`; it ends with its input, and with it all that still runs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests import process_guard
from tests.paths import python_path

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 90.0


def surroundings() -> dict[str, str]:
    """What a worker has in its environment: nothing of the test's own, and one thread."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "PYTEST_"))}
    return {**mine, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class Child:
    """A forked process, as :class:`subprocess.Popen` shows its own."""

    def __init__(self, pid: int, news: threading.Condition, codes: dict[int, int]) -> None:
        self.pid, self._news, self._codes = pid, news, codes

    def poll(self) -> int | None:
        """The exit code, minus a signal's number; None while it runs."""
        return self._codes.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        with self._news:
            if not self._news.wait_for(lambda: self.pid in self._codes, timeout):
                raise subprocess.TimeoutExpired([f"process {self.pid}"], timeout or 0.0)
            return self._codes[self.pid]


class Nursery:
    """The parent, and what it says."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.nursery"],
            env=surroundings(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._codes: dict[int, int] = {}
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
                else:
                    self._codes[said["ended"]] = said["code"]
                self._news.notify_all()

    def start(
        self, module: str, arguments: list[str], environment: dict[str, str], directory: Path, out: Path, err: Path
    ) -> Child:
        """Fork `python -m module arguments` in `directory`, with its output in `out` and `err`."""
        assert self._process.stdin is not None
        sys.audit(process_guard.NURSERY, module)
        words = {"module": module, "arguments": arguments, "environment": environment}
        with self._news:
            before = len(self._pids)
            order = {**words, "directory": str(directory), "out": str(out), "err": str(err)}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            assert self._news.wait_for(lambda: len(self._pids) > before, DEADLINE_S), "the nursery does not answer"
            return Child(self._pids[-1], self._news, self._codes)

    def close(self) -> None:
        """End it and all that it has started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._reader.join()
        self._process.stdout.close()


@functools.cache
def nursery() -> Nursery:
    """The one of this process, which ends with it."""
    one = Nursery()
    atexit.register(one.close)
    return one


# -- the parent -------------------------------------------------------------------------------------
def prepare() -> None:
    """Import what the programs need, and what torch imports when it is needed first."""
    import torch
    import torch.distributed

    import paceline.run.attach
    import tests.helpers

    del paceline, tests
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).step()
    gc.collect()
    gc.freeze()  # no collection in a forked process looks at what is imported, nor copies its pages


def say(what: dict[str, Any]) -> None:
    """To the test."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def fork_until_the_end() -> dict[str, Any] | None:
    """Fork what is ordered; in a forked process its order, in the parent None when its input has ended."""
    running: set[int] = set()
    rest = b""
    while True:
        if select.select([0], [], [], 0.01)[0]:
            piece = os.read(0, 1 << 16)
            if not piece:
                break
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    order: dict[str, Any] = json.loads(line)
                    return order
                running.add(pid)
                say({"pid": pid})
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.discard(pid)
                say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def live(order: dict[str, Any]) -> None:
    """The life of a forked process."""
    os.setsid()
    for number, name in ((1, order["out"]), (2, order["err"])):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    sys.argv[1:] = order["arguments"]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    prepare()
    ordered = fork_until_the_end()
    if ordered is not None:
        live(ordered)

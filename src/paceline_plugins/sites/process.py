# SPDX-License-Identifier: Apache-2.0
"""One worker process of an elastic run, started by this launcher or by an earlier one.

An exit watcher (`exit_watcher.py`) is the worker's parent. It leads the worker's session and writes its exit code. A
process is identified by its pid and its start time, so that a reused pid is never signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.launch.spawn import output_files
from paceline_plugins.sites import exit_watcher

UNKNOWN = -int(signal.SIGKILL)
"""The exit code of a worker whose exit watcher was killed before it could write one."""


@dataclass(frozen=True)
class OutputFiles:
    """The files of a worker."""

    stdout: Path  # stdout, stderr: its output
    stderr: Path
    status: Path  # its process and exit code, from the exit watcher
    # exists once an exchange that the worker took part in is committed, and while it waits to be needed
    exchanged: Path

    @classmethod
    def of(cls, output: Path, place: int, turn: int) -> OutputFiles:
        """The files of the `turn`-th process (from 1) at a place of this host."""
        name = f"place-{place:03d}" if turn == 1 else f"place-{place:03d}.{turn}"
        return cls(*(output / f"{name}.{kind}" for kind in ("out", "err", "json", "exchanged")))


@dataclass(frozen=True)
class Identity:
    """A process: its pid, and its start time from `exit_watcher.began`."""

    pid: int
    began: int

    @property
    def lives(self) -> bool:
        return self.began > 0 and exit_watcher.began(self.pid) == self.began


class Process:
    """A worker and its exit watcher.

    Args:
        identity: of the exit watcher.
        files: of the worker.
        child: the exit watcher, if this launcher started it.
    """

    def __init__(self, identity: Identity, files: OutputFiles, child: subprocess.Popen[bytes] | None = None) -> None:
        self.identity, self.files = identity, files
        self._child, self._code = child, None if child is not None or identity.lives else self._last_code()

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str], files: OutputFiles, folder: str = "."
    ) -> Process:
        """Start `command` under an exit watcher in the directory `folder`, in a session of its own."""
        for path in (files.status, Path(f"{files.status}.new"), files.exchanged):
            with contextlib.suppress(OSError):
                path.unlink()
        with output_files(files.stdout, files.stderr) as (out, err):
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", exit_watcher.__file__, str(files.status), *command],
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return cls(Identity(child.pid, exit_watcher.began(child.pid)), files, child)

    @classmethod
    def find(cls, files: OutputFiles, identity: Identity | None) -> Process | None:
        """A process of an earlier launcher, ended or not; None if none was started."""
        said = _read_status(files)
        if identity is None and "keeper" in said:  # the launcher was killed before it recorded the process
            identity = Identity(int(said["keeper"]), int(said["keeper_began"]))
        return None if identity is None else cls(identity, files)

    @property
    def adopted(self) -> bool:
        """Whether an earlier launcher started it."""
        return self._child is None

    @property
    def pid(self) -> int | None:
        """Of the worker itself; None before it has started."""
        found = _read_status(self.files).get("pid")
        return None if found is None else int(found)

    def poll(self) -> int | None:
        """The worker's exit code, None while it runs; kills what is left of its session at the end."""
        if self._code is None:
            if self._child is not None:
                self._code = self._reap(self._child)
            elif not self.identity.lives:
                self._code = self._last_code()
        return self._code

    def _reap(self, child: subprocess.Popen[bytes]) -> int | None:
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                return None
        _signal_group(child.pid, signal.SIGKILL)  # before the wait, while no other process can have the pid
        return int(_read_status(self.files).get("code", _as_shown(child.wait())))

    def _last_code(self) -> int:
        """The exit code of an ended worker that is no child of ours."""
        said = _read_status(self.files)
        if "code" not in said and Identity(int(said.get("pid", 0)), int(said.get("began", 0))).lives:
            _signal_group(self.identity.pid, signal.SIGKILL)  # the worker lives, so the group is still its own
        return int(_read_status(self.files).get("code", UNKNOWN))

    def ask_to_leave(self) -> bool:
        """SIGTERM to the worker alone, not to its children, which it needs until it has left; whether it was sent."""
        found = _read_status(self.files)
        worker = Identity(int(found.get("pid", 0)), int(found.get("began", 0)))
        if self.poll() is not None or not worker.lives:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGTERM)
        return True

    def signal(self, which: signal.Signals) -> None:
        """Signal the worker and all its descendants in its session's group."""
        if self.poll() is None:
            _signal_group(self.identity.pid, which)


def _as_shown(code: int) -> int:
    """The worker's code from that of an exit watcher that could not write its file: 128 + n for signal n."""
    return 128 - code if code > 128 else code


def _read_status(files: OutputFiles) -> dict[str, Any]:
    """The exit watcher's file; empty if missing, or damaged by a crash of the host."""
    with contextlib.suppress(OSError, ValueError):
        said = json.loads(files.status.read_text(encoding="utf-8"))
        if isinstance(said, dict):
            return said
    return {}


def _signal_group(leader: int, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, which)

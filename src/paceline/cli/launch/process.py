# SPDX-License-Identifier: Apache-2.0
"""One worker process of an elastic run: started here, or by a launcher that is no more.

Between the launcher and the worker stands a keeper (keeper.py), which leads the worker's session and writes down how it
ended. A process is known by its pid and by when it began, so that a pid that was used again is never touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.cli.launch import exit_watcher
from paceline.cli.run.output_files import output_files

UNKNOWN = -int(signal.SIGKILL)
"""The code of a worker whose keeper was killed before it could write one: the keeper cannot die of anything else."""


@dataclass(frozen=True)
class OutputFiles:
    """What a worker leaves.

    Attributes:
        stdout, stderr: what it prints.
        notes: what its keeper writes.
        exchanged: there as soon as an exchange counts in which the worker took part.
    """

    stdout: Path
    stderr: Path
    notes: Path
    exchanged: Path

    @classmethod
    def of(cls, output: Path, place: int, turn: int) -> OutputFiles:
        """The files of the `turn`-th process (from 1) at a place of this host, in the directory `output`."""
        name = f"place-{place:03d}" if turn == 1 else f"place-{place:03d}.{turn}"
        return cls(*(output / f"{name}.{kind}" for kind in ("out", "err", "json", "exchanged")))


@dataclass(frozen=True)
class Identity:
    """A process, and no other that may get its pid later.

    Attributes:
        pid: of the keeper.
        began: when it began, as :func:`paceline.cli.launch.exit_watcher.began` says.
    """

    pid: int
    began: int

    @property
    def lives(self) -> bool:
        """Whether it runs."""
        return self.began > 0 and exit_watcher.began(self.pid) == self.began

    def state(self) -> dict[str, int]:
        """For the launcher's record."""
        return asdict(self)


class Process:
    """A worker and its keeper.

    Args:
        identity: of the keeper.
        files: what the worker leaves.
        child: the keeper, where this launcher started it.
    """

    def __init__(self, identity: Identity, files: OutputFiles, child: subprocess.Popen[bytes] | None = None) -> None:
        self.identity, self.files = identity, files
        self._child, self._code = child, None if child is not None or identity.lives else self._last_code()

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str], files: OutputFiles, folder: str = "."
    ) -> Process:
        """Start `command` under a keeper in the directory `folder`, in a session of its own."""
        for path in (files.notes, Path(f"{files.notes}.new"), files.exchanged):
            with contextlib.suppress(OSError):
                path.unlink()
        with output_files(files.stdout, files.stderr) as (out, err):
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", exit_watcher.__file__, str(files.notes), *command],
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
        """A process of an earlier launcher, living or not; None where none was started."""
        said = _notes(files)
        if identity is None and "keeper" in said:  # the launcher was killed before it wrote down whom it had started
            identity = Identity(int(said["keeper"]), int(said["keeper_began"]))
        return None if identity is None else cls(identity, files)

    @property
    def adopted(self) -> bool:
        """Whether an earlier launcher started it."""
        return self._child is None

    @property
    def pid(self) -> int | None:
        """Of the worker itself; None before it has begun."""
        found = _notes(self.files).get("pid")
        return None if found is None else int(found)

    def poll(self) -> int | None:
        """The worker's exit code, None while it runs. When it is first seen, what it left behind is ended."""
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
        _signal_group(child.pid, signal.SIGKILL)  # before it is waited for: until then nobody else has the number
        return int(_notes(self.files).get("code", _as_shown(child.wait())))

    def _last_code(self) -> int:
        """Of one that is no child of ours, and over."""
        said = _notes(self.files)
        if "code" not in said and Identity(int(said.get("pid", 0)), int(said.get("began", 0))).lives:
            _signal_group(self.identity.pid, signal.SIGKILL)  # the worker lives, so the group is still its own
        return self._said()

    def _said(self) -> int:
        return int(_notes(self.files).get("code", UNKNOWN))

    def signal(self, which: signal.Signals) -> None:
        """Signal the worker and all its descendants in its session's group."""
        if self.poll() is None:
            _signal_group(self.identity.pid, which)


def _as_shown(code: int) -> int:
    """What a keeper that could not write its notes says by its own exit code: 128 + n for signal n."""
    return 128 - code if code > 128 else code


def _notes(files: OutputFiles) -> dict[str, Any]:
    """What the keeper has written; empty where it has not, or where a crash of the host left the file damaged."""
    with contextlib.suppress(OSError, ValueError):
        said = json.loads(files.notes.read_text(encoding="utf-8"))
        if isinstance(said, dict):
            return said
    return {}


def _signal_group(leader: int, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, which)

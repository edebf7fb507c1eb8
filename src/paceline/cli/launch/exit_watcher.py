# SPDX-License-Identifier: Apache-2.0
"""Stands between a launcher and one worker, and writes down how the worker ended.

A launcher that was killed and started again has workers that are not its children, and of those the kernel tells no
exit code. So each worker of an elastic run is the child of this small program, which needs nothing but the standard
library (it is run by its path, not imported) and writes to a file::

    {"pid": 4711, "began": 123456, "keeper": 4710, "keeper_began": 123455}              while the worker runs
    {"pid": 4711, "began": 123456, "keeper": 4710, "keeper_began": 123455, "code": -9}  after its end; -n: by signal n

The keeper leads a session of its own with the worker in it. It does not die of the signals that ask for an end: they
reach the worker as well, and its code is still to be written.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NOT_STARTED = 127  # as a shell says it


def keep(notes: str, command: list[str]) -> int:
    """Run `command` to its end; the file `notes` says which process it is, and how it ended."""
    for number in ASKING:
        signal.signal(number, _heard)  # a handler is forgotten by the worker, what is ignored would stay ignored
    try:
        pid = os.posix_spawnp(command[0], command, os.environ)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        _write(notes, {"keeper": os.getpid(), "keeper_began": began(os.getpid()), "code": NOT_STARTED})
        return NOT_STARTED
    about = {"pid": pid, "began": began(pid), "keeper": os.getpid(), "keeper_began": began(os.getpid())}
    _write(notes, about)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    _write(notes, {**about, "code": code})
    return 128 - code if code < 0 else code


def began(pid: int) -> int:
    """When a process began, in ticks since the host did; 0 where there is none. With it a pid means one process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0 if os.path.exists("/proc/self/stat") else _lives(pid)


def _lives(pid: int) -> int:
    """Where there is no /proc: 1 for a process that lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return 0
    except PermissionError:
        return 1
    return 1


def _write(path: str, about: dict[str, int]) -> None:
    """A disk that is full keeps no worker from its work; the launcher then reads the keeper's exit code."""
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(about, file)
        os.replace(f"{path}.new", path)


def _heard(number: int, frame: object) -> None:
    """The worker has heard it, too."""


if __name__ == "__main__":
    raise SystemExit(keep(sys.argv[1], sys.argv[2:]))

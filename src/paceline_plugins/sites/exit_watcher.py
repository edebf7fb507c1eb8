# SPDX-License-Identifier: Apache-2.0
"""Run one worker of an elastic run, and write its exit code to a file.

A new launcher that takes over from a killed one cannot wait for the workers: they are not its children. So each worker
is the child of this small program (called keeper in its file), which writes the exit code. It needs nothing but the
standard library, and is run by its path::

    {"pid": 4711, "began": 123456, "keeper": 4710, "keeper_began": 123455}              while the worker runs
    {"pid": 4711, "began": 123456, "keeper": 4710, "keeper_began": 123455, "code": -9}  after its end; -n: by signal n

It leads a session with the worker in it, and outlives SIGTERM, SIGINT and SIGHUP: they reach the worker as well, whose
exit code is still to be written.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NOT_STARTED = 127  # as a shell says it


def watch(path: str, command: list[str]) -> int:
    """Run `command` to its end; write its process, then its exit code, to the file `path`."""
    for number in STOPPING:
        signal.signal(number, _ignore)  # not SIG_IGN, which the worker would inherit
    try:
        pid = os.posix_spawnp(command[0], command, os.environ)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        _write(path, {"keeper": os.getpid(), "keeper_began": began(os.getpid()), "code": NOT_STARTED})
        return NOT_STARTED
    about = {"pid": pid, "began": began(pid), "keeper": os.getpid(), "keeper_began": began(os.getpid())}
    _write(path, about)
    _, wait_status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(wait_status)
    _write(path, {**about, "code": code})
    return 128 - code if code < 0 else code


def began(pid: int) -> int:
    """When a process began, in ticks since the host started; 0 where there is none. Tells apart users of one pid."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


def _write(path: str, about: dict[str, int]) -> None:
    """Replace the file. On a full disk the launcher falls back on this program's own exit code."""
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(about, file)
        os.replace(f"{path}.new", path)


def _ignore(number: int, frame: object) -> None:
    """The worker gets the signal as well."""


if __name__ == "__main__":
    raise SystemExit(watch(sys.argv[1], sys.argv[2:]))

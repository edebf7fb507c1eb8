# SPDX-License-Identifier: Apache-2.0
"""Notes each process that a test starts, so that no test of the fast tier does so unseen."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import sys
from collections.abc import Iterator
from typing import Any

NURSERY = "tests.nursery.start"
"""What the nursery raises as an audit event when it forks a child: its parent is another process."""
EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", NURSERY}
FINDERS = ("ldconfig',)", "gcc',)", "ld',)", "uname',)", "fc-list',)")
"""What `ctypes.util`, `platform` and matplotlib's fonts ask once, on a new machine, in whichever test is first."""

_started: list[str] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in EVENTS and _started is not None and not str(arguments[:1]).endswith(FINDERS):
        _started.append(f"{event} {arguments[:2]}"[:200])


def install() -> None:
    """Once in a process: an audit hook cannot be removed."""
    sys.addaudithook(_hook)
    spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]  # starts a process without an event

    def spawned(path: bytes, arguments: list[str], *more: Any) -> Any:
        _hook("os.posix_spawn", (path, arguments))
        return spawn(path, arguments, *more)

    multiprocessing.util.spawnv_passfds = spawned  # type: ignore[attr-defined]


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """What is started from here to the end of the block."""
    global _started
    before, _started = _started, []
    found = _started
    try:
        yield found
    finally:
        _started = before

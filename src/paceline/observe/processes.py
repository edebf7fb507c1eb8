# SPDX-License-Identifier: Apache-2.0
"""Which process wrote a log, and whether it still runs: a process is its id and when it began, in one space of ids."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any


def me() -> dict[str, Any]:
    """This process, for a log."""
    return {"pid": os.getpid(), "began": _began(os.getpid()), "space": _space()}


def is_gone(host: str, about: Mapping[str, Any]) -> bool:
    """Whether the process that a log on `host` tells of is known to have ended; False where nobody can see it."""
    pid, began, space = (about.get(name) for name in ("pid", "began", "space"))
    if not (isinstance(pid, int) and isinstance(began, int) and began and space):
        return False
    return host == socket.gethostname() and space == _space() and _began(pid) != began


def _began(pid: int) -> int:
    """In ticks since the host did; 0 where there is none, or none that runs."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


def _space() -> str:
    """Of process ids: that of a container, or of the host since it was started; "" where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{os.readlink('/proc/self/ns/pid')} {file.read().strip()}"
    except OSError:
        return ""

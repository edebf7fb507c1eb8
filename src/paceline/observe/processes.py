# SPDX-License-Identifier: Apache-2.0
"""Which process wrote a log, and whether it still runs.

A process is its id and its start time, in one namespace of process ids.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """This process, for a log."""
    return {"pid": os.getpid(), "began": _start_ticks(os.getpid()), "space": _pid_namespace()}


def is_gone(host: str, about: Mapping[str, Any]) -> bool:
    """Whether the process that a log on `host` names has certainly ended; False where this host cannot tell."""
    pid, began, space = (about.get(name) for name in ("pid", "began", "space"))
    if not (isinstance(pid, int) and isinstance(began, int) and began and space):
        return False
    return host == socket.gethostname() and space == _pid_namespace() and _start_ticks(pid) != began


def _start_ticks(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0 where none runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


def _pid_namespace() -> str:
    """A container's or a booted host's; "" where the system does not say."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{os.readlink('/proc/self/ns/pid')} {boot_id}"
    except OSError:
        return ""

# SPDX-License-Identifier: Apache-2.0
"""What the kernel counts for a host: bytes that left it, and processor seconds of all processes in it.

Read from within the host. The bytes are those of its interface, so no library's own books are asked.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Set
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PROCESS_CLOCK = 2  # of Linux: what the scheduler counted for a process, in nanoseconds; see clock_getcpuclockid


def sent_bytes(interface: str) -> int:
    """Bytes that left through an interface of this process's network namespace, with their headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    raise SystemExit(f"this host has no interface {interface}")


def namespace_of(process: int | str) -> int:
    """The network namespace of a process, as the number of its inode; 0 where the process is gone."""
    try:
        return os.stat(f"/proc/{process}/ns/net").st_ino
    except OSError:
        return 0


def processes_in(namespaces: Set[int]) -> Iterator[int]:
    """All processes in these network namespaces."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and namespace_of(path.name) in namespaces:
            yield int(path.name)


def processor_s() -> float:
    """Processor seconds of all processes in this process's network namespace, and of their children that ended."""
    seconds = 0.0
    for process in processes_in({namespace_of("self")}):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            ended = int(fields[13]) + int(fields[14])
            seconds += time.clock_gettime(~process << 3 | PROCESS_CLOCK) + ended / TICKS
    return seconds

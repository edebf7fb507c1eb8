# SPDX-License-Identifier: Apache-2.0
"""Waiting for what processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def until(what: Callable[[], object], why: str = "it did not happen", deadline_s: float = 120.0) -> None:
    """Poll, with a deadline."""
    end = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < end, why
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

# SPDX-License-Identifier: Apache-2.0
"""Drops groups of torch.distributed.

The destructor of a group waits until the group's operations have ended, which may take until their deadline. So a group
is kept until they have. No thread waits for that: one that comes back from a destructor while the interpreter ends
aborts the process.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from typing import Any

DROP_S = 1.0
"""Seconds to wait for the operations of dropped groups."""

_lock = threading.Lock()
_kept: list[tuple[Any, list[Any]]] = []  # groups, and torch's operations in flight on each


def drop(groups: list[tuple[Any, list[Any]]]) -> None:
    """Drop groups: their sockets close, which ends the waits of the peers.

    Args:
        groups: each with torch's operations in flight on it; emptied. One whose operations do not end within a moment
            is kept until a later call.
    """
    with _lock:
        _kept.extend(groups)
    groups.clear()
    end = time.monotonic() + DROP_S
    while _sweep() and time.monotonic() < end:
        time.sleep(0.01)


def _sweep() -> int:
    """Destroy the groups whose operations have ended, in this thread; how many others are kept."""
    over: list[tuple[Any, list[Any]]] = []
    kept: list[tuple[Any, list[Any]]] = []
    with _lock:
        for one in _kept:
            (over if all(handle.is_completed() for handle in one[1]) else kept).append(one)
        _kept[:] = kept
    return len(kept)


@atexit.register
def _leave() -> None:
    """The groups that are still kept are never destroyed."""
    drop([])
    for group, _ in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

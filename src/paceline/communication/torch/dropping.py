# SPDX-License-Identifier: Apache-2.0
"""Drops groups of torch.distributed in a thread beside the training.

The destructor of a group waits until the group's operations have ended, which may take until their deadline. It runs in
the thread that drops the last reference.
"""

from __future__ import annotations

import atexit
import gc
import sys
import threading
import time
from typing import Any

DROP_S = 1.0
"""Seconds to wait until dropped groups have closed their sockets."""
HELD_S = 30.0
"""Most seconds for which another thread may hold a group that is dropped."""
ALONE = 2
"""What `sys.getrefcount` says of an object in a list that nothing else refers to."""

_droppers: set[threading.Thread] = set()


def drop(handles: list[Any], groups: list[Any]) -> None:
    """Drop what these lists hold: the sockets of the groups close, which ends the waits of the peers.

    Args:
        handles: torch's operations in flight on the groups.
        groups: of which other threads may hold a reference for a moment.
    """
    dropper = threading.Thread(target=_forget, args=(handles, groups), name="paceline-drop", daemon=True)
    _droppers.add(dropper)
    dropper.start()
    dropper.join(DROP_S)


def _forget(handles: list[Any], groups: list[Any]) -> None:
    """Drop the last reference to each group here.

    Another thread holds a group while it starts an operation, and in the frames of an error.
    """
    handles.clear()
    end = time.monotonic() + HELD_S
    while groups:
        gc.collect()
        while sys.getrefcount(groups[-1]) > ALONE and time.monotonic() < end:
            time.sleep(0.01)
        groups.pop()
    gc.collect()
    _droppers.discard(threading.current_thread())


@atexit.register
def _await_droppers() -> None:
    """One that comes back from native code while the interpreter ends would abort the process."""
    end = time.monotonic() + 2 * DROP_S
    for dropper in list(_droppers):
        dropper.join(max(0.0, end - time.monotonic()))

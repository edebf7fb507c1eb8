# SPDX-License-Identifier: Apache-2.0
"""Threads, locks, clock, connections and files of this process, or of a simulated machine.

Code that decides (membership, commits, rings) takes them from here instead of from `threading`, `time`, `os` and
`socket`. In a process they are Python's own. In a thread of `devtools.world` they belong to the simulated
machine that runs the thread, so that one seed decides what happens when.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.core.disk import LOCAL_DISK, LocalDisk

END_S = 5.0
"""Most seconds that the interpreter's exit waits for the threads of this process."""
Owner = TypeVar("Owner")

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_ends: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


class _Local(threading.local):
    machine: Any = None  # the simulated machine of this thread (`devtools.world.process.Process`)


_here = _Local()


def enter(machine: Any) -> None:
    """From now on this thread belongs to a simulated machine; None: to this process."""
    _here.machine = machine


def network() -> Any:
    """The simulated network of this thread, if any."""
    return None if _here.machine is None else _here.machine.network


def host() -> tuple[str, str] | None:
    """Name and address of the simulated machine of this thread, if any."""
    here = _here.machine
    return None if here is None else (here.host, here.address)


def process() -> list[str] | None:
    """Kernel, process namespace, number and start of the simulated process of this thread, if any."""
    return None if _here.machine is None else _here.machine.identity


def lives(number: int) -> bool:
    """Whether the simulated machine of this thread still has that process."""
    return _here.machine is not None and bool(_here.machine.lives(number))


def monotonic() -> float:
    """`time.monotonic`."""
    return time.monotonic() if _here.machine is None else _here.machine.monotonic()


def wall() -> float:
    """`time.time`: it may jump, so nothing is decided by it."""
    return time.time() if _here.machine is None else _here.machine.wall()


def pid() -> int:
    """`os.getpid`."""
    return os.getpid() if _here.machine is None else _here.machine.pid


def living(pid: int) -> bool:
    """Whether this machine has such a process, as far as this one can see."""
    if _here.machine is not None:
        return bool(_here.machine.living(pid))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def token_hex(size: int) -> str:
    """`secrets.token_hex`: of `size` random bytes."""
    return secrets.token_hex(size) if _here.machine is None else _here.machine.token_hex(size)


def sleep(seconds: float) -> None:
    """`time.sleep`."""
    if _here.machine is None:
        time.sleep(seconds)
    else:
        _here.machine.sleep(seconds)


def thread(target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> threading.Thread:
    """A daemon thread that is not started yet. Its owner ends it, at the latest when the interpreter ends."""
    if _here.machine is None:
        own = threading.Thread(target=target, name=name, args=args, daemon=True)
        _threads.add(own)
        return own
    made: threading.Thread = _here.machine.thread(target, args, name)
    return made


def end_at_exit(owner: Owner, end: Callable[[Owner], object]) -> None:
    """Call `end(owner)` when the interpreter ends, if `owner` still lives."""
    if _here.machine is None:
        _ends[owner] = end


@atexit.register
def _await_threads() -> None:
    """End all threads: one that comes back from native code while the interpreter ends aborts the process."""
    for owner, end in list(_ends.items()):
        with contextlib.suppress(Exception):
            end(owner)
    until = time.monotonic() + END_S
    for one in list(_threads):
        if one.ident is not None:
            one.join(max(0.0, until - time.monotonic()))


def current_thread() -> threading.Thread:
    """`threading.current_thread`."""
    return threading.current_thread() if _here.machine is None else _here.machine.current_thread()


def Lock() -> threading.Lock:
    """`threading.Lock`."""
    return threading.Lock() if _here.machine is None else _here.machine.lock()


def RLock() -> threading.RLock:
    """`threading.RLock`."""
    return threading.RLock() if _here.machine is None else _here.machine.rlock()


def Condition(lock: Any = None) -> threading.Condition:
    """`threading.Condition`."""
    here = _here.machine
    return threading.Condition(lock) if here is None else here.condition(lock or here.rlock())


def Event() -> threading.Event:
    """`threading.Event`."""
    return threading.Event() if _here.machine is None else _here.machine.event()


def SimpleQueue() -> queue.SimpleQueue[Any]:
    """`queue.SimpleQueue`."""
    return queue.SimpleQueue() if _here.machine is None else _here.machine.queue()


def disk() -> LocalDisk:
    """The disk of this process, or of its simulated machine."""
    return LOCAL_DISK if _here.machine is None else _here.machine.disk

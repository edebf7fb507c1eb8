# SPDX-License-Identifier: Apache-2.0
"""Locks, conditions, events and queues of a simulated world, with the interfaces of `threading` and `queue`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Any

from devtools.world.scheduler import Scheduler, SimThread


class SimLock:
    """`threading.Lock`, and with `again` `threading.RLock`."""

    def __init__(self, world: Scheduler, again: bool = False) -> None:
        self._world, self._again = world, again
        self._owner: SimThread | None = None
        self._depth = 0
        self._waiting: deque[SimThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = self._world
        if not world.running:  # this interpreter ends, and nothing else runs
            return True
        world.occasion()
        me = world.current
        if self._again and self._owner is me:
            self._depth += 1
            return True
        until = None if timeout < 0 else world.now + timeout
        while self._owner is not None:
            if not blocking:
                return False
            self._waiting.append(me)
            if not world.park(until):
                return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        if not self._world.running or (self._world.current is not self._owner and self._again):
            return  # of a killed thread, which ends in the middle of `Condition.wait`
        self._depth -= 1
        if self._depth <= 0:
            self.free()

    def free(self) -> int:
        """Release it wholly; returns how often it was taken."""
        depth, self._depth, self._owner = self._depth, 0, None
        while self._waiting:
            one = self._waiting.popleft()
            if one.parked:
                self._world.wake(one)
                break
        return depth

    def take(self, depth: int) -> None:
        """Acquire it as often as it was before `free`."""
        while self._owner is not None:
            self._waiting.append(self._world.current)
            self._world.park()
        self._owner, self._depth = self._world.current, depth

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimCondition:
    """`threading.Condition`."""

    def __init__(self, world: Scheduler, lock: SimLock) -> None:
        self._world, self._lock = world, lock
        self._waiting: list[SimThread] = []
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        world = self._world
        if not world.running:
            return False
        me = world.current
        self._waiting.append(me)
        depth = self._lock.free()
        woken = world.park(None if timeout is None else world.now + max(0.0, timeout))
        if me in self._waiting:
            self._waiting.remove(me)
        self._lock.take(depth)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else self._world.now + timeout
        while not (found := predicate()):
            left = None if until is None else until - self._world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        for one in self._waiting[:n]:
            self._waiting.remove(one)
            self._world.wake(one)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimEvent:
    """`threading.Event`."""

    def __init__(self, world: Scheduler) -> None:
        self._world, self._set = world, False
        self._waiting: list[SimThread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._world.wake(one)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else self._world.now + max(0.0, timeout)
        while not self._set:
            self._waiting.append(self._world.current)
            if not self._world.park(until):
                break
        return self._set


class SimQueue:
    """`queue.SimpleQueue`."""

    def __init__(self, world: Scheduler) -> None:
        self._world = world
        self._items: deque[Any] = deque()
        self._waiting: deque[SimThread] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        while self._waiting:
            one = self._waiting.popleft()
            if one.parked:
                self._world.wake(one)
                break

    def get(self) -> Any:
        while not self._items:
            self._waiting.append(self._world.current)
            self._world.park()
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise Empty
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class SimWaker:
    """What :class:`paceline.communication.sockets.framing.Waker` is.

    Attributes:
        woken: since it was cleared.
        waiting: the thread that waits for that.
    """

    def __init__(self, world: Scheduler) -> None:
        self._world, self.woken = world, False
        self.waiting: SimThread | None = None

    def wake(self) -> None:
        self.woken = True
        if self.waiting is not None:
            self._world.wake(self.waiting)

    def clear(self) -> None:
        self.woken = False

    def close(self) -> None:
        self.woken = False

# SPDX-License-Identifier: Apache-2.0
"""The open files or decoded tables that a process used last."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Part = TypeVar("Part")


class LruCache(Generic[Part]):
    """Parts by number, least recently used first; empty in a forked child and after pickling.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return LruCache, (self._most,)

    def _clear(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._parts: OrderedDict[int, Part] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, number: int, make: Callable[[], Part]) -> Part:
        """Part `number`, made where it is missing; two threads may both make it."""
        if self._process != os.getpid():
            self._clear()
        lock, parts = self._lock, self._parts
        with lock:
            if number in parts:
                parts.move_to_end(number)
                return parts[number]
        part = make()
        with lock:
            parts[number] = part
            while len(parts) > self._most:
                parts.popitem(last=False)
        return part

# SPDX-License-Identifier: Apache-2.0
"""The threads of a socket service."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

JOIN_S = 2.0
"""How long a thread may take to end when its connection is closed."""


class ServiceThreads:
    """Daemon threads whose errors are reported.

    Args:
        failed: called with the error of a thread: one that ended silently would leave the others waiting.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._threads: list[threading.Thread] = []

    def start(self, name: str, body: Callable[[], None]) -> None:
        """Start one."""

        def guarded() -> None:
            try:
                body()
            except BaseException as error:
                self._failed(error)

        thread = threading.Thread(target=guarded, name=f"paceline-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def start_single_core(self, bodies: Mapping[str, Callable[[], None]], timeout_s: float) -> None:
        """Start threads whose torch keeps to one core each; returns when all of them run."""
        threads = torch.get_num_threads()
        ready = threading.Barrier(1 + len(bodies))
        for name, body in bodies.items():
            self.start(name, _single(ready, body))
        ready.wait(timeout_s)
        torch.set_num_threads(threads)  # those of the program

    def join(self) -> None:
        """Wait for the threads to end."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)


def _single(ready: threading.Barrier, body: Callable[[], None]) -> Callable[[], None]:
    """`body` in a thread whose torch keeps to one core: shards are small, and the other cores compute."""

    def run() -> None:
        torch.set_num_threads(1)
        ready.wait()
        body()

    return run

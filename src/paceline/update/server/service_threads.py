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
        failed: called with the error of a thread, for which the training thread might wait otherwise.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._threads: list[threading.Thread] = []

    def start(self, name: str, body: Callable[[], None]) -> None:
        """Start a thread."""

        def guarded() -> None:
            try:
                body()
            except BaseException as error:
                self._failed(error)

        thread = threading.Thread(target=guarded, name=f"paceline-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def start_single_core(self, bodies: Mapping[str, Callable[[], None]], timeout_s: float) -> None:
        """Start threads in which torch uses one core each; returns when all of them run."""
        threads = torch.get_num_threads()
        ready = threading.Barrier(1 + len(bodies))
        for name, body in bodies.items():
            self.start(name, _single(ready, body))
        ready.wait(timeout_s)
        torch.set_num_threads(threads)  # torch sets it for the program, too

    def join(self) -> None:
        """Wait for the threads to end."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)


def _single(ready: threading.Barrier, body: Callable[[], None]) -> Callable[[], None]:
    """`body` for a thread in which torch uses one core: shards are small, and the other cores compute."""

    def run() -> None:
        torch.set_num_threads(1)
        ready.wait()
        body()

    return run

# SPDX-License-Identifier: Apache-2.0
"""The threads of a socket service."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

import torch

from paceline.core import runtime
from paceline.errors import PacelineError

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

        thread = runtime.thread(guarded, f"paceline-{name}")
        self._threads.append(thread)
        thread.start()

    def start_single_core(self, bodies: Mapping[str, Callable[[], None]], timeout_s: float) -> None:
        """Start threads in which torch uses one core each; returns when all of them run."""
        threads = torch.get_num_threads()
        waiting, changed = set(bodies), runtime.Condition()

        def single(name: str, body: Callable[[], None]) -> None:
            torch.set_num_threads(1)  # shards are small, and the other cores compute
            with changed:
                waiting.discard(name)
                changed.notify_all()
            body()

        for name, body in bodies.items():
            self.start(name, partial(single, name, body))
        with changed:
            if not changed.wait_for(lambda: not waiting, timeout_s):
                raise PacelineError(f"threads of this process did not start within {timeout_s:g} s: {sorted(waiting)}")
        torch.set_num_threads(threads)  # torch sets it for the program, too

    def join(self) -> None:
        """Wait for the threads to end."""
        for thread in self._threads:
            if thread is not runtime.current_thread():
                thread.join(JOIN_S)

# SPDX-License-Identifier: Apache-2.0
"""The workers of a host leave an elastic run in order, once their launcher gets SIGTERM."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline_plugins.sites.supervisor import GRACE_S, Supervisor

OF_TIMEOUT = 0.25
"""Of the run's timeout: how long workers may take to leave."""
REASON = "its launcher got SIGTERM"


class Departure:
    """Lets the workers of this host leave.

    Args:
        workers: of this host.
        write: writes an event.
        timeout_s: of the run.
    """

    def __init__(self, workers: Supervisor, write: Callable[[str, Mapping[str, Any]], None], timeout_s: float) -> None:
        self._workers, self._write, self._patience_s = workers, write, max(GRACE_S, OF_TIMEOUT * timeout_s)
        self._asked, self._until = False, float("inf")

    def ends_launcher(self, received: Sequence[signal.Signals]) -> bool:
        """Whether the launcher ends now: by a signal, except the first SIGTERM, at which its workers leave first."""
        if not received:
            return False
        if len(received) > 1 or received[0] != signal.SIGTERM or self._workers.over:
            return True
        self._asked = True
        return not self._workers.running or time.monotonic() > self._until

    def look(self) -> None:
        """Let the workers leave, once they are asked to."""
        if not self._asked:
            return
        if self._until == float("inf"):
            self._until = time.monotonic() + self._patience_s
            self._write("leaving", {"reason": REASON, "seconds": round(self._patience_s)})
        self._workers.leave()

    @property
    def left(self) -> str:
        """Why all workers of this host left in order; "" if they did not."""
        gone = not self._workers.running and any(place.left for place in self._workers.places)
        return REASON if gone and self._asked else ""

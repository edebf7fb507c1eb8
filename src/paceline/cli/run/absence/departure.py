# SPDX-License-Identifier: Apache-2.0
"""The workers of a host leave an elastic run in order, for good or for now, and come back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.cli.launch.supervisor import GRACE_S, Supervisor
from paceline.cli.run.absence.options import Absence

OF_TIMEOUT = 0.25
"""Of the run's timeout: how long workers may take to leave."""


class Departure:
    """Lets the workers of this host leave.

    Args:
        workers: of this host.
        write: writes an event.
        timeout_s: of the run.

    Attributes:
        absence: why they are to leave.
    """

    def __init__(self, workers: Supervisor, write: Callable[[str, Mapping[str, Any]], None], timeout_s: float) -> None:
        self._workers, self._write, self._patience_s = workers, write, max(GRACE_S, OF_TIMEOUT * timeout_s)
        self.absence = Absence()
        self._away, self._until = "", float("inf")

    def ends_launcher(self, received: Sequence[signal.Signals]) -> bool:
        """Whether the launcher ends now: by a signal, except the first SIGTERM, at which its workers leave first."""
        if not received:
            return self._late and bool(self.absence.asked)
        if len(received) > 1 or received[0] != signal.SIGTERM or self._workers.over:
            return True
        self.absence.asked = self.absence.asked or "its launcher got SIGTERM"
        return self._late or not self._workers.running

    def look(self) -> None:
        """Let the workers leave if they are to be absent, and start them again afterwards."""
        why = self.absence.for_good() or self.absence.for_now()
        if why and not self._away:
            self._until = time.monotonic() + self._patience_s
            self._write("leaving", {"reason": why, "seconds": round(self._patience_s)})
        elif self._away and not why:
            self._write("returning", {})
            self._workers.come_back()
        self._away = why
        if not why:
            return
        self._workers.leave()
        if self._late and not self.absence.asked:  # the user of the host waits no longer
            self._workers.stop(signal.SIGTERM)

    @property
    def left(self) -> str:
        """Why all workers of this host left for good, in order; "" if they did not."""
        gone = not self._workers.running and any(place.left for place in self._workers.places)
        return self.absence.asked if gone else ""

    @property
    def _late(self) -> bool:
        return bool(self._workers.running) and time.monotonic() > self._until

# SPDX-License-Identifier: Apache-2.0
"""While a run waits for workers, one live worker writes a checkpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from paceline.core import runtime
from paceline.errors import PacelineError
from paceline.flow.membership import ElasticMembership
from paceline.update.monitor import Monitor

logger = logging.getLogger("paceline")
SAVE_S = 60.0
"""How long a worker that leaves waits for such a step, seconds."""
LOOK_AGAIN_S = 0.02
"""How long the saving worker waits for its training thread to apply a committed exchange, seconds."""


def save_while_paused(membership: ElasticMembership, monitor: Monitor, save: Callable[[], None]) -> Callable[[], None]:
    """Call `save`, in a thread of its own, when the run waits for workers and this worker is to save it.

    Returns:
        A function that waits for such a thread.
    """
    threads: list[threading.Thread] = []

    def keep() -> None:
        done = False
        while membership.control.paused and not done:
            with membership.applying:
                done = membership.exact  # else the training thread is about to apply a commit
                if done and membership.control.paused:
                    save()
            if not done:
                runtime.sleep(LOOK_AGAIN_S)

    def keep_or_warn() -> None:
        try:
            keep()
        except PacelineError as error:
            logger.warning("%s: no step was written while the run waits for workers", error)

    def paused(why: str) -> None:
        monitor.note("paused", reason=why)
        if why and membership.control.saves:
            threads[:] = [runtime.thread(keep_or_warn, "paceline-pause")]
            threads[0].start()

    membership.control.on_pause(paused)

    def finish() -> None:
        for thread in threads:
            thread.join(SAVE_S)

    return finish

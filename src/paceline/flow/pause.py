# SPDX-License-Identifier: Apache-2.0
"""While a run waits for workers, one of those that are there writes a checkpoint."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from paceline.errors import PacelineError
from paceline.flow.membership import Membership
from paceline.update.monitor import Monitor

logger = logging.getLogger("paceline")
LOOK_AGAIN_S = 0.02
"""How long a worker that is to save waits for its training thread to apply an exchange that counts."""


def save_while_paused(members: Membership, monitor: Monitor, save: Callable[[], None]) -> None:
    """`save` is called, in a thread of its own, when the run waits for workers and this one is to save it."""

    def keep() -> None:
        done = False
        while members.member.paused and not done:
            with members.applying:
                done = members.exact  # else an exchange counts already, and the training thread is about to apply it
                if done and members.member.paused:
                    save()
            if not done:
                time.sleep(LOOK_AGAIN_S)

    def keep_or_warn() -> None:
        try:
            keep()
        except PacelineError as error:
            logger.warning("%s: no step was written while the run waits for workers", error)

    def paused(why: str) -> None:
        monitor.note("paused", reason=why)
        if why and members.member.saves:
            threading.Thread(target=keep_or_warn, name="paceline-pause", daemon=True).start()

    members.member.on_pause(paused)

# SPDX-License-Identifier: Apache-2.0
"""A worker leaves an elastic run in order, because its machine is about to be taken: on SIGTERM.

At the top of the program's loop it ends its block early. The other members are called, so that its work is committed
at once. Then it says goodbye and exits with :data:`paceline.errors.LEFT`. What it has leased and not trained on goes to
other workers, so every sample is trained on once. A worker that does not hold the state yet leaves at once. A second
SIGTERM ends the process at once.

While the run waits for workers, one live worker writes a checkpoint (`save_while_paused`).
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from paceline.core import runtime
from paceline.errors import LEFT, PacelineError
from paceline.flow.control import wire
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


LOST = (
    "this worker leaves, no other worker holds the model, and attach() got no checkpoint=: what the run has learnt is "
    "lost, and it begins anew when workers join"
)


class Leaving:
    """Lets a worker leave in order; its work counts if it holds the state."""

    def __init__(self, membership: ElasticMembership, holds: Callable[[], bool]) -> None:
        self._membership, self._holds = membership, holds
        self.asked = False  # whether it is to leave
        # writes a checkpoint step and waits for it; None: the run has no checkpoints
        self.save: Callable[[], None] | None = None
        # called at the end of the run: waits for a step that is being written
        self.finish: Callable[[], None] = lambda: None
        self._listens = _may_listen()
        if self._listens:
            signal.signal(signal.SIGTERM, self._terminated)

    def saves(self, save: Callable[[], None], finish: Callable[[], None]) -> None:
        """The run has checkpoints."""
        self.save, self.finish = save, finish

    @property
    def gone(self) -> bool:
        """Whether it has left: its run cannot be ended together with the other workers."""
        return self._membership.control.left

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self.close()
        self.asked = True
        self._membership.control.leave_soon()
        if not self._holds():
            self._membership.control.leave_at_once()
            raise SystemExit(LEFT)

    def leave(self, exchange: Callable[[], object]) -> NoReturn:
        """Say goodbye, and end the program; all work of this worker is committed.

        After an `exchange` joining workers hold the state as well.
        """
        membership, control = self._membership, self._membership.control
        while (others := control.leave(wire.LEAVES)) is not None:
            if others:
                exchange()
                continue
            if self.save is None:
                logger.warning("%s", membership.transport.world.sign(LOST))
            else:
                self.save()
            control.leave(wire.LEAVES_ANYWAY)
            break
        raise SystemExit(LEFT)

    def close(self) -> None:
        """From now on SIGTERM ends the process."""
        if self._listens and threading.current_thread() is threading.main_thread():
            self._listens = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _may_listen() -> bool:
    """Whether SIGTERM is ours: not in simulated worlds, and not where the program handles it."""
    if runtime.host() is not None or threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

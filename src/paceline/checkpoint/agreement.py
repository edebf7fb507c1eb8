# SPDX-License-Identifier: Apache-2.0
"""What workers tell each other while a checkpoint is made or read, so that they go on alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from paceline.communication import Transport
from paceline.errors import CheckpointError


def all_well(transport: Transport, problem: str, what: str, sums: dict[str, str] | None = None) -> list[Any]:
    """Everybody's sums; the same error on all workers where one had a problem."""
    everybody = transport.gather_json({"problem": problem, "sums": sums or {}})
    world = transport.world
    said = [f"{world.name(rank)}: {one['problem']}" for rank, one in enumerate(everybody) if one["problem"]]
    if said:
        raise CheckpointError(world.sign(f"the checkpoint {what}: " + "; ".join(said)))
    return [one["sums"] for one in everybody]


class Directly:
    """Work is done where it is asked for; others wait at most for the deadline of the connection."""

    def done(self, transport: Transport, work: Callable[[], None]) -> None:
        """Do it."""
        work()


class WithBeats:
    """Work that may take longer than the deadline of the connection: workers say meanwhile that they are alive.

    Args:
        beat_s: how often, seconds; well below the deadline.
    """

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s

    def done(self, transport: Transport, work: Callable[[], None]) -> None:
        """Return when all workers have done theirs; every worker calls it alike."""
        over = threading.Event()

        def body() -> None:
            try:
                work()
            finally:
                over.set()

        threading.Thread(target=body, name="paceline-checkpoint-files", daemon=True).start()
        while True:
            mine = over.wait(self._beat_s)
            if all(transport.gather_json(mine)):
                return


Working = Directly | WithBeats

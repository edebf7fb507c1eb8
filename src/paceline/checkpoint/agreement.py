# SPDX-License-Identifier: Apache-2.0
"""How workers agree while they write or read a checkpoint, so that all go on alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.communication import Transport
from paceline.core import runtime
from paceline.errors import CheckpointError

Working = Callable[[Transport, Callable[[], None]], None]
"""Does this worker's part of the work; every worker calls it at the same place."""


def all_well(transport: Transport, problem: str, what: str, sums: dict[str, str] | None = None) -> list[Any]:
    """All workers' sums; where one of them had a problem, the same error on every worker."""
    everybody = transport.gather_json({"problem": problem, "sums": sums or {}})
    world = transport.world
    problems = [f"{world.name(rank)}: {one['problem']}" for rank, one in enumerate(everybody) if one["problem"]]
    if problems:
        raise CheckpointError(world.sign(f"the checkpoint {what}: " + "; ".join(problems)))
    return [one["sums"] for one in everybody]


def without_beats(transport: Transport, work: Callable[[], None]) -> None:
    """Work in this thread; other workers wait for it at most until the connection's deadline."""
    work()


def with_beats(beat_s: float) -> Working:
    """Work that may outlast the connection's deadline: workers exchange a message every `beat_s` seconds meanwhile."""

    def working(transport: Transport, work: Callable[[], None]) -> None:
        over = runtime.Event()

        def body() -> None:
            try:
                work()
            finally:
                over.set()

        runtime.thread(body, "paceline-checkpoint-files").start()
        while True:
            mine = over.wait(beat_s)
            if all(transport.gather_json(mine)):
                return

    return working

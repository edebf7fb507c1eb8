# SPDX-License-Identifier: Apache-2.0
"""A storm over elastic runs whose workers leave in order, among all other faults; others come in their places.

Besides what the model counts, each training of a sample is counted where it happens. Where faults spare the
workers, every sample is trained on exactly once. (A worker that is asked to leave while the run waits below its
minimum is lost: its work since the last exchange cannot be committed.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from devtools.storm.elastic import STORM_S
from devtools.storm.training import TrainingStorm
from torch import Tensor

from paceline.errors import LEFT, PacelineError
from paceline.run.run import Run

MOST_LEAVE = 6
SPARING = {"leave", "join", "slow_network", "slow_disk"} | {
    f"{what}_{where}" for what in ("kill", "power") for where in ("control", "at_write")
}
"""Faults that end no worker, and leave the steps whole."""


class LeavingStorm(TrainingStorm):
    """Members that leave."""

    def prepare(self) -> None:
        super().prepare()
        self.runs: list[Run] = []
        self.trained: Counter[tuple[int, int]] = Counter()
        self.left = self.lost = 0

    def arrive(self) -> None:
        super().arrive()
        rng = self.world.rng
        for _ in range(rng.randint(2, MOST_LEAVE)):
            self.faults.also("leave", STORM_S * rng.random(), partial(self._leave, rng.random(), rng.random() < 0.2))

    def _told(self, kind: str, about: dict[str, Any]) -> None:
        super()._told(kind, about)
        self.lost += kind == "lost"

    def begun(self, run: Run) -> None:
        self.runs.append(run)

    def stepped(self, ids: Tensor, epoch: int) -> None:
        self.trained.update((epoch, sample) for sample in ids.tolist())

    def _leave(self, pick: float, all_at_once: bool) -> str:
        """Ask a worker that trains to leave, or all that do."""
        there = self.server._machine.workers if self.server is not None else {}
        living = [run for run in self.runs if not run._closed and _worker(run) in there]
        chosen = living if all_at_once else living[int(pick * len(living)) :][:1]
        for run in chosen:
            elastic = run._parts.elastic
            assert elastic is not None
            elastic.leaving.asked = elastic.membership.control.leaves = elastic.joining.settled
        return ", ".join(f"worker {_worker(run)}" for run in chosen)

    def program(self, done: Callable[[BaseException | None], None]) -> Callable[[], None]:
        def main() -> None:
            try:
                self._train()
            except PacelineError as error:
                done(error)
                raise
            except SystemExit as error:
                if error.code != LEFT:
                    raise
                self.left += 1
                return  # another one takes its place, as after a host was in use
            done(None)

        return main

    def check(self) -> None:
        super().check()
        begun_anew = self.steps is None and self.server is not None and self.server._machine.restores
        if self.ended and not self.lost and not begun_anew and self.faults.counts.keys() <= SPARING:
            times = Counter(self.trained[epoch, one] for epoch in range(self.epochs) for one in range(self.samples))
            if set(times) != {1}:
                self.problems.append(f"samples were trained on so often: {dict(times)}")


def _worker(run: Run) -> int:
    membership = run._parts.membership
    assert membership is not None
    return membership.control.worker

# SPDX-License-Identifier: Apache-2.0
"""The position of a training of a pair: what its checkpoints hold besides weights, optimizer and data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline_dual.pair import DIRECTIONS

NOWHERE = -1
"""The step of something that has not been done yet."""


class Position:
    """Step, measurements and this worker's generator, with the methods that a checkpoint needs.

    Args:
        seed: of the samples.
        rank: of this worker, which draws samples of its own.
        workers: number of workers.
        device: where samples are drawn.

    Attributes:
        step: the next one, from 0.
        evaluated: the last step before which held-out pairs were evaluated.
        saved: the last step before which the state was saved.
        seconds: training time of this worker.
        rows: of the history.
        sums: [2, 4]: for each direction since the last evaluation, the number of batches, and sums of r1, r2 and r.
        generator: of samples.
    """

    def __init__(self, seed: int, rank: int, workers: int, device: torch.device) -> None:
        self._seed, self._rank, self._workers = seed, rank, workers
        self.step, self.evaluated, self.saved = 0, NOWHERE, NOWHERE
        self.seconds = 0.0
        self.rows: list[dict[str, Any]] = []
        self.sums = torch.zeros(len(DIRECTIONS), 4, dtype=torch.float64)
        self.generator = torch.Generator(device)
        self._begin_to_draw()

    def _begin_to_draw(self) -> None:
        """Seed the generator: differently for each worker, and anew where another number of workers resumes."""
        mixed = (self._seed * 1_000_003 + self._rank) * 1_000_003 + self.step
        self.generator.manual_seed(mixed % (1 << 63))

    def reward(self, direction: str, numbers: Tensor) -> None:
        """Add a batch with these mean r1, r2 and r."""
        row = self.sums[DIRECTIONS.index(direction)]
        row[0] += 1
        row[1:] += numbers.to("cpu", torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        plain = ("step", "evaluated", "saved", "seconds")
        return {
            **{name: getattr(self, name) for name in plain},
            "rows": self.rows,
            "sums": self.sums.clone(),
            "workers": self._workers,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint, which may be of another number of workers."""
        for name in ("step", "evaluated", "saved", "seconds"):
            setattr(self, name, state[name])
        self.rows, self.sums = list(state["rows"]), state["sums"].clone()
        if state["workers"] == self._workers:
            self.generator.set_state(state["generator"])
            return
        self.sums.zero_()  # worker 0's sums alone would be misleading
        self._begin_to_draw()

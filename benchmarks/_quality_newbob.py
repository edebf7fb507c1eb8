# SPDX-License-Identifier: Apache-2.0
"""A rate that follows the held-out loss, as the publications' does (Newbob): looks at equal distances, r <- r/2 at each

once a look has found the loss less than 1 % lower than the look before; the end, once it is less than 0.1 % lower.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

from _quality_tasks import Task
from torch import Tensor, nn

LOOKS = 10
"""In a training."""
HALVE, END = 0.01, 0.001


class Newbob:
    """The control of one training; all its workers have the same rate, since one model is looked at.

    Args:
        task: what is trained.
        model: any of its models.
        folder: of its data.
        minibatches: of all workers, if it does not end earlier.
    """

    def __init__(self, task: Task, model: nn.Module, folder: Path, minibatches: int) -> None:
        self.factor, self.over = 1.0, False
        self._task, self._model, self._folder = task, copy.deepcopy(model), folder
        self._every, self._looks = minibatches / LOOKS, 0
        self._before, self._halves = math.inf, False

    def due(self, done: int) -> bool:
        """Whether it is time to look, after so many minibatches."""
        return done >= self._every * (self._looks + 1)

    def look(self, parameters: dict[str, Tensor]) -> None:
        """Judge the global model."""
        self._looks += 1
        self._model.load_state_dict(parameters, strict=False)
        self.hear(self._task.judge(self._model, self._folder))

    def hear(self, loss: float) -> None:
        """Take a held-out loss."""
        better = 1 - loss / self._before
        self.over = self._halves and better < END
        self._halves = self._halves or better < HALVE
        self._before = loss
        if self._halves:
            self.factor /= 2

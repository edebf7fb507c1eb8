# SPDX-License-Identifier: Apache-2.0
"""A rate that follows the held-out loss, as the publications' does: the package's own `Newbob`, by one stacked run."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

from _quality_tasks import Task
from torch import Tensor, nn

from paceline.tuning import Newbob

LOOKS = 10
"""In a training, at equal distances."""


class Control:
    """The rate of one training: all its workers have the same, since one model is looked at.

    Args:
        task: what is trained.
        model: any of its models.
        folder: of its data.
        minibatches: of all workers, if it does not end earlier.

    Attributes:
        factor: of the rate.
        over: whether the training ends.
    """

    def __init__(self, task: Task, model: nn.Module, folder: Path, minibatches: int) -> None:
        self.factor, self.over = 1.0, False
        self._task, self._model, self._folder = task, copy.deepcopy(model), folder
        self._every, self._looks = minibatches / LOOKS, 0
        alone = SimpleNamespace(gather=lambda said: [said])
        self._newbob = Newbob(SimpleNamespace(messages=alone, world=SimpleNamespace(rank=0), tune=self._tune))

    def _tune(self, lr_factor: float) -> None:
        self.factor *= lr_factor

    def due(self, done: int) -> bool:
        """Whether it is time to look, after so many minibatches."""
        return done >= self._every * (self._looks + 1)

    def look(self, parameters: dict[str, Tensor]) -> None:
        """Judge the global model."""
        self._looks += 1
        self._model.load_state_dict(parameters, strict=False)
        self.over = self._newbob.validated(self._task.judge(self._model, self._folder))

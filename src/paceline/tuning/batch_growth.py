# SPDX-License-Identifier: Apache-2.0
"""The largest minibatch that does not hurt yet, found by short trials from the same state.

    b_0 < b_1 < ..      candidates, b_0 the present minibatch
    L_j                 mean over the workers of the probe's loss after a trial with b_j, at the rate times b_j / b_0
    take the last b_j before the first with   L_j > L_0 (1 + margin)

After each trial all state is restored bit for bit: model, optimizers, outer state, codec residuals, data position,
random generators. So a trial costs only its time.

Source: Seide et al., Interspeech 2014 (1-bit SGD), whose minibatches grow as the model gets better because larger ones
hide more communication: "automatic minibatch scaling" tries sizes on a small part of the data. The form of the test, a
margin over the loss of the smallest, is that of CNTK's autoAdjustMinibatch (minibatchSearchCriterionErrorMargin, 1 %
there as here). The rate is that of a sample: in proportion to the minibatch, as there; `scaled=False` leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline.errors import RuleError, UnsupportedError


class BatchGrowth:
    """Chooses the minibatch size between two steps; every worker calls it at the same step.

    >>> import torch, paceline
    >>> from paceline.tuning import BatchGrowth
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> run = paceline.attach(model, optimizer, "bmuf")
    >>> loss = {8: 1.000, 16: 1.004, 32: 1.200}  # what the probe finds after a trial with each size
    >>> sizes = []
    >>> growth = BatchGrowth(run, margin=0.01)
    >>> growth.choose(8, [16, 32], trial=sizes.append, probe=lambda: loss[sizes[-1]])
    16
    >>> run.close()

    Args:
        run: a run whose workers exchange together.
        margin: the fraction by which a larger minibatch may raise the loss.
        scaled: whether to scale the rate with the minibatch.
    """

    def __init__(self, run: Any, *, margin: float = 0.01, scaled: bool = True) -> None:
        if run.world.size > 1 and not run.rule.schedule.workers_meet:
            raise UnsupportedError("workers of an asynchronous rule are never at the same place; use another rule")
        if not margin >= 0:
            raise RuleError(f"margin must be at least 0, got {margin!r}")
        self._run, self._margin, self._scaled = run, margin, scaled
        self.losses: dict[int, float] = {}

    def choose(
        self, minibatch: int, larger: Sequence[int], trial: Callable[[int], None], probe: Callable[[], float]
    ) -> int:
        """The size to continue with, the same on all workers; a scaled rate follows at the next exchange.

        Args:
            minibatch: the present size.
            larger: candidates above it.
            trial: trains with a size, on the same number of samples for each; all workers make equally many steps.
            probe: returns the loss of this worker's part of the probe after a trial.
        """
        sizes = [minibatch, *sorted(larger)]
        if len(set(sizes)) < len(sizes) or sizes != sorted(sizes) or minibatch < 1:
            raise RuleError(f"candidates must be different and above the present minibatch, got {sizes}")
        before = self._run.snapshot()
        self.losses, chosen = {}, minibatch
        for size in sizes:
            loss = self.losses[size] = self._try(before, size / minibatch, partial(trial, size), probe)
            if not loss <= self.losses[minibatch] + self._margin * abs(self.losses[minibatch]):
                break
            chosen = size
        if self._scaled and chosen != minibatch and self._run.world.rank == 0:
            self._run.tune(lr_factor=chosen / minibatch)
        return chosen

    def _try(self, before: Any, ratio: float, trial: Callable[[], None], probe: Callable[[], float]) -> float:
        """The loss after a trial, whose other effects are undone."""
        try:
            if self._scaled:
                self._run.scale_rates(ratio)
            trial()
            losses = [float(one) for one in self._run.messages.gather(str(float(probe())))]
        finally:
            self._run.restore(before)
        return math.fsum(losses) / len(losses)

# SPDX-License-Identifier: Apache-2.0
"""A schedule of the learning rate that needs all workers.

Newbob: halve the rate once validation stalls, and stop when halving does not help any more.

    L_k       mean over the workers of the validation loss after epoch k;  L* the best so far
    r_k     = (L*_{k-1} - min(L*_{k-1}, L_k)) / L*_{k-1}               relative improvement
    halving : begins with the first epoch of r_k < start, and never ends
    rate    : times `factor` after every epoch with halving
    stop    : with halving under way before epoch k, and r_k < end

Source: the rule that Kaldi's neural network recipes took over from QuickNet: `steps/nnet/train_scheduler.sh`, whose
defaults these are (start_halving_impr 0.01, end_halving_impr 0.001, halving_factor 0.5, keep_lr_iters 0). Where we
differ: Kaldi throws a model away whose loss did not fall and goes on from the best one; here the model goes on, because
every change of it would have to be made in the outer state as well. Save a checkpoint where the loss is best.
The first loss is Kaldi's from before training, if `validated` is called then; else the first epoch only sets L*.
"""

from __future__ import annotations

import math
from typing import Any

from paceline.errors import RuleError


class Newbob:
    """Called after every validation on all workers; rank 0 tunes. May be included in checkpoints.

    >>> import torch, paceline
    >>> from paceline.tuning import Newbob
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> run = paceline.attach(model, optimizer, "bmuf")
    >>> schedule = Newbob(run)
    >>> [schedule.validated(loss) for loss in (2.0, 1.5, 1.499)]  # the last is better by less than 1 %
    [False, False, False]
    >>> schedule.halving  # from here on each validation halves the rate, until it helps no more
    True
    >>> run.close()

    Args:
        run: the run.
        start: relative improvement below which halving begins.
        end: relative improvement below which training stops.
        factor: of the rate at each halving.
        keep: number of validations at the start without a change of the rate.
    """

    def __init__(
        self, run: Any, *, start: float = 0.01, end: float = 0.001, factor: float = 0.5, keep: int = 0
    ) -> None:
        if not 0 <= end <= start:
            raise RuleError(f"end must lie between 0 and start ({start!r}), got {end!r}")
        if not 0 < factor < 1:
            raise RuleError(f"factor must lie between 0 and 1, got {factor!r}")
        self._run, self._start, self._end, self._factor, self._keep = run, start, end, factor, keep
        self.best = math.nan
        self.halving = self.done = False
        self.count = 0

    def validated(self, loss: float) -> bool:
        """Call it on every worker after each validation.

        Args:
            loss: of this worker's part of the validation data; the mean over the workers counts.

        Returns:
            Whether to stop training, alike on all workers.
        """
        losses = [float(one) for one in self._run.messages.gather(str(float(loss)))]  # JSON has no nan
        mean = sum(losses) / len(losses)
        first = math.isnan(self.best)
        self.count += not first
        if first or self.count <= self._keep:
            self.best = mean
            return self.done
        better = mean < self.best
        improvement = (self.best - mean) / abs(self.best) if better and self.best else 0.0
        self.best = mean if better else self.best
        self.done = self.done or (self.halving and improvement < self._end)
        self.halving = self.halving or improvement < self._start
        if self.halving and not self.done and self._run.world.rank == 0:
            self._run.tune(lr_factor=self._factor)
        return self.done

    def state_dict(self) -> dict[str, Any]:
        """For `run.include` and `run.save`."""
        return {"best": str(self.best), "halving": self.halving, "done": self.done, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.count = float(state["best"]), int(state["count"])
        self.halving, self.done = bool(state["halving"]), bool(state["done"])

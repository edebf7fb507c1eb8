# SPDX-License-Identifier: Apache-2.0
"""Schedules of the learning rate that need all workers.

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

Warm-up and linear scaling, in samples of all workers.

    peak    = rate * N b / batch                            the linear scaling rule
    rate(s) = rate + (peak - rate) * min(1, s / S)          gradual warm-up

b is a worker's minibatch, N the workers, `rate` what suits a minibatch of `batch` on one worker, s the samples that all
workers have seen, S the length of the warm-up in samples. So the length does not depend on N, b or the period.

Source: Goyal et al. 2017, arXiv 1706.02677: rate 0.1 for 256 images, scaled by the size of the minibatch, after a
warm-up of five epochs from 0.1. Where we differ: the rate follows samples in steps, every `every` minibatches, because
each change is agreed on by all workers; and a block rule takes it at a block's end. For rules that exchange blocks,
whose gain already credits N workers (:mod:`paceline.rules.outer.gain`), `scaled=False` leaves the peak at `rate`, from
0.
"""

from __future__ import annotations

import math
from typing import Any

from paceline.core.parse import check_whole
from paceline.errors import RuleError, UnsupportedError


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
        if math.isnan(self.best):
            self.best = mean
            return self.done
        self.count += 1
        if self.count <= self._keep:
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
        """Restore `state_dict`."""
        self.best, self.count = float(state["best"]), int(state["count"])
        self.halving, self.done = bool(state["halving"]), bool(state["done"])


class WarmUp:
    """Called after every step on all workers; rank 0 tunes.

    >>> import torch, paceline
    >>> from paceline.tuning import WarmUp
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> run = paceline.attach(model, optimizer, "bmuf")
    >>> schedule = WarmUp(run, rate=0.1, samples=1000, minibatch=512)  # call schedule.stepped() after each step
    >>> schedule.peak, round(schedule.rate_at(500), 3)  # 0.1 for 256 samples is 0.2 for 512
    (0.2, 0.15)
    >>> run.close()

    Args:
        run: the run; `run.share` must share its loader, so that samples are counted.
        rate: for a minibatch of `batch` on one worker.
        samples: S, of all workers together.
        minibatch: b, samples of a worker's minibatch.
        batch: samples of the minibatch that `rate` is for.
        every: minibatches of a worker between two changes.
        scaled: whether to scale the peak; else it is `rate`, and the warm-up starts at 0.
    """

    def __init__(
        self,
        run: Any,
        *,
        rate: float,
        samples: int,
        minibatch: int,
        batch: int = 256,
        every: int = 50,
        scaled: bool = True,
    ) -> None:
        if run.world.size > 1 and not run.rule.schedule.workers_meet:
            raise UnsupportedError("workers of an asynchronous rule go on unevenly and cannot gather at a step")
        for name, value in (("samples", samples), ("minibatch", minibatch), ("batch", batch), ("every", every)):
            check_whole(name, value, 1)
        if not rate > 0:
            raise RuleError(f"rate must be above 0, got {rate!r}")
        self._run, self._samples, self._every = run, samples, every
        self.low = rate if scaled else 0.0
        self.peak = rate * run.world.size * minibatch / batch if scaled else rate
        self.over = False

    def rate_at(self, samples: int) -> float:
        """The rate after `samples` samples of all workers together."""
        return self.low + (self.peak - self.low) * min(1.0, samples / self._samples)

    def stepped(self) -> None:
        """Call it on every worker after every step, until `over`; all make the same number of steps."""
        run = self._run
        if self.over or run.minibatches % self._every:
            return
        seen = sum(run.messages.gather(run.samples))
        if not seen:
            raise UnsupportedError("no samples are counted: share the loader with run.share")
        self.over = seen >= self._samples
        if run.world.rank == 0:
            run.tune(lr=self.rate_at(seen))

    def state_dict(self) -> dict[str, Any]:
        """For `run.include` and `run.save`."""
        return {"over": self.over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.over = bool(state["over"])

# SPDX-License-Identifier: Apache-2.0
"""Warm-up and linear scaling, in samples of all workers.

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

from typing import Any

from paceline.errors import RuleError, UnsupportedError


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
            if not isinstance(value, int) or value < 1:
                raise RuleError(f"{name} must be a whole number, at least 1, got {value!r}")
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

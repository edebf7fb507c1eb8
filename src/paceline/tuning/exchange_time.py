# SPDX-License-Identifier: Apache-2.0
"""A period from measured times: as short as the network allows, and no shorter.

The least period tau* that keeps exchanges at a share of the time, tau* = ceil(e (1 - share) / (share c)), is that of
:mod:`paceline.rules.schedule.paced`: e is what exchanging the whole model once keeps a worker, c the time of a
minibatch, both measured since the last look. Waiting for stragglers counts in neither: a longer period does not make
them faster. The largest e and the mean c of all workers decide, so that all compute the same number. The period changes
if it is off by more than the hysteresis, within limits. If exchanges overlap the next block, e is the part of them that
a worker waits for. Rules with the schedule `Paced` do all this themselves.

Source: ours. That the best period balances the cost of an exchange against what is lost by stale models is in every
treatment of local SGD; the share of 0.05 is a choice.
"""

from __future__ import annotations

from typing import Any

from paceline.errors import RuleError, UnsupportedError
from paceline.rules.schedule.paced import least_period


class PeriodFromExchange:
    """Called after every step on all workers; rank 0 tunes.

    >>> import torch, paceline
    >>> from paceline.tuning import PeriodFromExchange
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> run = paceline.attach(model, optimizer, "bmuf")
    >>> schedule = PeriodFromExchange(run, share=0.05)  # call schedule.stepped() after each step
    >>> schedule.period_for(exchange_s=0.2, minibatch_s=0.1)
    38
    >>> run.close()

    Args:
        run: a run under a rule that exchanges blocks.
        share: the fraction of the time that exchanges may take.
        least, most: limits of the period.
        every: blocks between two looks.
        hysteresis: the period stays unless it is off by more than the factor 1 + hysteresis.
    """

    def __init__(
        self,
        run: Any,
        *,
        share: float = 0.05,
        least: int = 1,
        most: int = 512,
        every: int = 16,
        hysteresis: float = 0.25,
    ) -> None:
        if not run.rule.schedule.exchanges_blocks:
            raise UnsupportedError(f"{run.rule.text()} exchanges no blocks together, so it has no period to set")
        if not 0 < share < 1:
            raise RuleError(f"share must lie between 0 and 1, got {share!r}")
        if not 1 <= least <= most:
            raise RuleError(f"limits must be at least 1 and in order, got {least!r} and {most!r}")
        schedule = run.rule.schedule
        self._run, self._share, self._every, self._hysteresis = run, share, every, hysteresis
        self._least: int = max(least, schedule.fragments, schedule.overlap)
        self._most: int = max(most, self._least)
        self._looked = run.blocks
        self._before = [*run.spent, run.minibatches]

    def period_for(self, exchange_s: float, minibatch_s: float) -> int:
        """tau* within the limits; the upper limit if a minibatch takes no time."""
        if minibatch_s <= 0:
            return self._most
        return max(self._least, min(self._most, least_period(exchange_s, minibatch_s, self._share)))

    def stepped(self) -> None:
        """Call it on every worker after every step; all make the same number of steps."""
        run = self._run
        if run.blocks < self._looked + self._every:
            return
        blocks, self._looked = run.blocks - self._looked, run.blocks
        now = [*run.spent, run.minibatches]
        compute_s, _, exchange_s, made = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        said = run.messages.gather([exchange_s / blocks, compute_s / max(made, 1)])
        wanted = self.period_for(max(row[0] for row in said), sum(row[1] for row in said) / len(said))
        period = run.rule.schedule.period
        ratio = max(wanted / period, period / wanted)
        if run.world.rank == 0 and ratio > 1 + self._hysteresis:
            run.tune(period=wanted)

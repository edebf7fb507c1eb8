# SPDX-License-Identifier: Apache-2.0
"""Asynchronous recipes: each worker exchanges by itself with the owners of the shards."""

from __future__ import annotations

from paceline.core.parse import is_whole
from paceline.errors import RuleError
from paceline.rules.outer import (
    AdaDelay,
    Arrival,
    Average,
    DelayCompensated,
    Elastic,
    Rescaled,
    Share,
    StalenessAware,
    Sum,
    TunedMomentum,
)
from paceline.rules.payload import Delta, Gradient, Parameters
from paceline.rules.recipes.options import Recipe
from paceline.rules.rule import Rule
from paceline.rules.schedule import Bounded, EveryBlock, EveryStep
from paceline.rules.topology import Ordered, Sharded


def _free(overlap: int, hold: int, outer: Arrival) -> Rule:
    """A rule of gradients without a bound on staleness."""
    return Rule(Bounded(overlap=overlap, hold=hold), Gradient(), topology=Sharded(), outer=outer)


def asgd(*, period: int = 1, overlap: int = 1, hold: int = 1, piece: int = 262_144, rescaled: bool = False) -> Rule:
    """Asynchronous SGD: each worker pushes its gradient, or a block's displacement, without waiting for other workers.

    The model moves N times as far as one worker would move it: lower the learning rate with N.

    Bytes: 2 (N-1)/N * 4 P a step (a block, with a period above 1) from each worker, pushed and answered.

    Args:
        period: 1 sends gradients, and the optimizer steps at the owners; more sends what so many local steps changed.
        overlap: 1 gives the answer the next minibatch's time; 0 waits for it.
        hold: minibatches (blocks) that are gathered into one push while an answer is late; then the worker waits.
        piece: elements of a piece, at most; a whole multiple of 64.
        rescaled: a slow worker's pushes count for more, so that its data count as much as a fast one's: for data of
            each worker's own; with overlap=0.
    """
    if rescaled and overlap:
        raise RuleError(f"asgd(rescaled=True) takes a worker's time from its delays: give overlap=0, got {overlap!r}")
    payload = Gradient() if period == 1 else Delta("keep")
    schedule = Bounded(period=period, overlap=overlap, hold=hold)
    return Rule(schedule, payload, topology=Sharded(piece), outer=Rescaled() if rescaled else Sum())


def ssp(*, staleness: int | None = 3, period: int = 1) -> Rule:
    """Stale synchronous parallel: no worker is more than `staleness` clocks ahead of the slowest.

    With 0 it is lockstep: the very rule of sync(reproducible=True), or of averaging with a longer period.

    Bytes: 2 (N-1)/N * 4 P a step (a block, with a period above 1) from each worker, pushed and answered.

    >>> from paceline.rules.recipes import ssp
    >>> ssp(staleness=3).schedule.describe(workers=4)
    'every minibatch, each worker by itself, at most 3 ahead of the slowest; waits for the answer'

    Args:
        staleness: s, clocks that a worker may be ahead; None for any number.
        period: minibatches of a clock: 1 sends gradients, more what so many local steps changed.
    """
    if is_whole(staleness) and staleness == 0:
        if period == 1:
            return Rule(EveryStep(), Gradient(), topology=Ordered(), outer=Average())
        return Rule(EveryBlock(period), Delta(), topology=Ordered(), outer=Average())
    payload = Gradient() if period == 1 else Delta("keep")
    return Rule(Bounded(staleness, period, overlap=0), payload, topology=Sharded(), outer=Share())


def adadelay(*, c: float | str = "adaptive", overlap: int = 1, hold: int = 1) -> Rule:
    """AdaDelay: the step falls with time and with the measured delay.

    Bytes: 2 (N-1)/N * 4 P a step from each worker, pushed and answered.

    Args:
        c: how fast it falls: "adaptive" measures that for each coordinate, or a number.
        overlap: 1 gives the answer the next minibatch's time; 0 waits for it.
        hold: minibatches (blocks) that are gathered into one push while an answer is late; then the worker waits.
    """
    return _free(overlap, hold, AdaDelay(c))


def staleness_aware(*, overlap: int = 1, hold: int = 1) -> Rule:
    """Staleness-aware asynchronous SGD: the learning rate is divided by the delay.

    Bytes: 2 (N-1)/N * 4 P a step from each worker, pushed and answered.

    Args:
        overlap: 1 gives the answer the next minibatch's time; 0 waits for it.
        hold: minibatches (blocks) that are gathered into one push while an answer is late; then the worker waits.
    """
    return _free(overlap, hold, StalenessAware())


def momentum_tuned(*, keep_gain: bool = True, overlap: int = 1, hold: int = 1) -> Rule:
    """Asynchronous SGD whose momentum is lowered by what asynchrony adds, 1 - 1/N; for torch.optim.SGD.

    Bytes: 2 (N-1)/N * 4 P a step from each worker, pushed and answered.

    Args:
        keep_gain: change the learning rate so that a steady gradient moves as far as with the user's momentum.
        overlap: 1 gives the answer the next minibatch's time; 0 waits for it.
        hold: minibatches (blocks) that are gathered into one push while an answer is late; then the worker waits.
    """
    return _free(overlap, hold, TunedMomentum(keep_gain))


def dc_asgd(
    *,
    kind: str = "constant",
    strength: float | None = None,
    decay: float = 0.95,
    limit: float | None = None,
    start: int | float = 0,
    overlap: int = 1,
    hold: int = 1,
) -> Rule:
    """Delay-compensated asynchronous SGD: each stale gradient is brought to where the model is now.

    Bytes: 2 (N-1)/N * 4 P a step from each worker, pushed and answered.

    Args:
        kind: "constant"; "adaptive": the strength is divided by the gradient's running root mean square; or
            "normalized": by its running mean square, so that one strength fits from the first to the last minibatch.
        strength: lam0; None for 0.04 (constant), 2 (adaptive) or 0.25 (normalized). The first two grow with the batch.
        decay: of that running mean.
        limit: the largest correction of an element as a share of it; None for no limit, as published.
        start: `asgd` until then: a whole number of minibatches of all workers, or a fraction of the highest learning
            rate, as 0.5 for "once the rate has been halved".
        overlap: 1 gives the answer the next minibatch's time; 0 waits for it.
        hold: minibatches (blocks) that are gathered into one push while an answer is late; then the worker waits.
    """
    return _free(overlap, hold, DelayCompensated(kind, strength, decay, limit, start))


def easgd(*, period: int = 16, beta: float = 0.9, overlap: int = 1, hold: int = 1) -> Rule:
    """Elastic averaging: every block a worker and the center pull each other; the center is the model.

    Bytes: 2 (N-1)/N * 4 P a block from each worker, pushed and answered.

    Args:
        period: tau, minibatches between two pulls.
        beta: N alpha, how strong the pull is, above 0, at most 1.
        overlap: 1 gives the answer the next minibatch's time; 0 waits for it.
        hold: minibatches (blocks) that are gathered into one push while an answer is late; then the worker waits.
    """
    schedule = Bounded(period=period, overlap=overlap, hold=hold)
    return Rule(schedule, Parameters(), topology=Sharded(), outer=Elastic(beta))


ASYNCHRONOUS = (
    Recipe(
        "asgd",
        "Asynchronous SGD: each worker pushes when it has something, and waits for none.",
        """at the owner of a piece, for each push:
period 1:  theta = one step of the optimizer on g
else:      theta = theta + d                 (d: what `period` local steps changed)""",
        "J. Dean et al., NIPS 2012 (Downpour)",
        "Workers differ in speed, delays are small, and to compare with: its loss grows with N.",
        asgd,
    ),
    Recipe(
        "ssp",
        "Stale synchronous parallel: no worker is more than s clocks ahead of the slowest.",
        """a worker at clock c starts when  c - min_i c_i <= s
theta = one step of the optimizer on g_i with lr / N        (blocks: theta + d_i / N)""",
        "Q. Ho et al., NIPS 2013",
        "Workers differ in speed, and a bound on the delay is worth waiting for; staleness=0 is lockstep.",
        ssp,
    ),
    Recipe(
        "adadelay",
        "AdaDelay: the step falls with time and with the measured delay.",
        """alpha_j = 1 / (1/lr + c_j sqrt(t + tau))
c_j = sqrt((1/t) sum_s s / (s + tau_s) g_sj^2)              (or a constant)
theta_j = theta_j - alpha_j g_j""",
        "S. Sra et al., AISTATS 2016, arXiv 1508.05003",
        "As asgd, where few pushes are much later than the rest, and where the rate is to fall by itself.",
        adadelay,
    ),
    Recipe(
        "staleness_aware",
        "Staleness-aware SGD: the learning rate is divided by the delay.",
        "theta = one step of the optimizer on g with lr / max(1, tau)",
        "W. Zhang et al., IJCAI 2016, arXiv 1511.05950",
        "As asgd, where few pushes are much later than the rest: they count for less.",
        staleness_aware,
    ),
    Recipe(
        "momentum_tuned",
        "Asynchronous SGD with the momentum lowered by what asynchrony adds.",
        """m_e = m - (1 - 1/N)                          (may be negative)
lr_e = lr (1 - m_e) / (1 - m)                (keeps the gain)
theta = one step of SGD on g with m_e and lr_e""",
        "I. Mitliagkas et al., Allerton 2016, arXiv 1605.09774",
        "As asgd, with SGD with momentum.",
        momentum_tuned,
    ),
    Recipe(
        "dc_asgd",
        "Delay-compensated SGD: each stale gradient is brought to where the model is now.",
        """g = g + lam g g (theta - theta_pulled)
lam = lam0                                                  (constant)
MS = decay MS + (1 - decay) g g,  lam = lam0 / sqrt(MS + 1e-7)      (adaptive)
MS likewise,                       lam = lam0 / (MS + 1e-12)        (normalized)
theta = one step of the optimizer on g""",
        "S. Zheng et al., ICML 2017, arXiv 1609.08326",
        "As asgd, with many workers: late gradients are corrected, not reduced. Without a limit it can diverge.",
        dc_asgd,
    ),
    Recipe(
        "easgd",
        "Elastic averaging: workers and a center pull each other, every block.",
        """e = alpha (theta_i - center),  alpha = beta / N
theta_i = theta_i - e,  center = center + e                 (the center is exported)""",
        "S. Zhang et al., NIPS 2015, arXiv 1412.6651",
        "Exchanges have to be rare, and workers may go ways of their own between them.",
        easgd,
    ),
)

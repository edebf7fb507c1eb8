# SPDX-License-Identifier: Apache-2.0
"""Asynchronous outer steps that differ in the rate of a push only.

    gradient:   theta <- one step of the optimizer on g with the learning rate lr * rate
    delta:      theta <- theta + rate * d

    Sum:              rate = 1
    Rescaled:         rate = (tau + 1) / N
    Share:            rate = 1 / N
    StalenessAware:   rate = 1 / max(1, tau)

*Sum* makes nothing of the delay. N workers move the model N times as far in a clock as one does, so the learning rate
is the one of a single worker, or less: with a delay of about N - 1 on a curvature h, plain SGD is stable only below
about pi / (2 N h). Source: Dean et al., NIPS 2012 (Downpour); Recht et al., NIPS 2011 (the same without locks, in
shared memory). Where we differ: the user's own optimizer steps, not Adagrad.

*Rescaled*: a push counts by the time that its worker has computed, so that the data of slow and fast ones count alike.
tau + 1 is that time in pushes of all, and N on average where workers wait for their answers. Source: arXiv 2605.13434,
whose rates follow the computing times; tau as their measure is ours.

*Share*: when each of N workers has pushed once, a clock is over, and the model has moved about as far as in one
synchronous step on the mean: exactly as far with plain SGD and equal gradients, lr sum_i g_i / N. It is the learning
rate that is divided and not the gradient, so this holds for Adam too, whose steps do not feel the size of a gradient.
With deltas the sum of a clock is model averaging. N counts who makes the clock to which a push belongs, workers that
have ended with it included: of equal workers the last to end moves the model no farther than the first. Source: the
division is ours; it makes the bounded staleness of Ho et al., NIPS 2013, end in lockstep's step as s falls.

*StalenessAware*: tau is the delay of the push. With N workers of one speed tau is N - 1 on average, and N workers move
the model about as far as one: what is gained is the noise that averages out. Source: Zhang et al., IJCAI 2016, arXiv
1511.05950: lr / tau for tau >= 1, lr for tau = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.rules.outer.arrival import Arrival, Push


@dataclass(frozen=True)
class Sum(Arrival):
    """Apply each push in full."""

    def describe(self, workers: int) -> str:
        return "each push in full, as it comes"


@dataclass(frozen=True)
class Rescaled(Arrival):
    """Apply each push by the time that its worker took."""

    def rate(self, push: Push) -> float:
        """(tau + 1) / N."""
        return (push.delay + 1) / push.workers

    def describe(self, workers: int) -> str:
        return "each push by the time that its worker took"


@dataclass(frozen=True)
class Share(Arrival):
    """Apply each push with 1/N."""

    def rate(self, push: Push) -> float:
        """1 / N."""
        return 1 / push.workers

    def numbers(self, workers: int) -> dict[str, float | int | str]:
        return {"share": 1 / workers}

    def describe(self, workers: int) -> str:
        return f"each push as it comes, with 1/{workers} of the rate"


@dataclass(frozen=True)
class StalenessAware(Arrival):
    """Apply each push with 1/tau."""

    def rate(self, push: Push) -> float:
        """1 / max(1, tau)."""
        return 1 / max(1, push.delay)

    def describe(self, workers: int) -> str:
        return "each push as it comes, its rate divided by its delay"

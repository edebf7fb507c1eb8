# SPDX-License-Identifier: Apache-2.0
"""Share: a worker's push is its share of a clock's step.

    gradient:   theta <- one step of the optimizer on g with the rate lr / N
    delta:      theta <- theta + d / N

When each of N workers has pushed once, a clock is over, and the model has moved about as far as in one synchronous step
on the mean: exactly as far with plain SGD and equal gradients, lr sum_i g_i / N. It is the learning rate that is
divided and not the gradient, so this holds for Adam too, whose steps do not feel the size of a gradient. With deltas
the sum of a clock is model averaging. N counts who makes the clock to which a push belongs, workers that have ended
with it included: of equal workers the last to end moves the model no farther than the first.

Source: the division is ours; it makes the bounded staleness of Ho et al., NIPS 2013, end in lockstep's step as s falls.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.rules.outer.arrival import Plain, Push


@dataclass(frozen=True)
class Share(Plain):
    """Apply each push with 1/N."""

    def rate(self, push: Push) -> float:
        """1 / N."""
        return 1 / push.workers

    def numbers(self, workers: int) -> dict[str, float | int | str]:
        """1/N."""
        return {"share": 1 / workers}

    def describe(self, workers: int) -> str:
        return f"each push as it comes, with 1/{workers} of the rate"

# SPDX-License-Identifier: Apache-2.0
"""Sum: every push is a step of its own.

    gradient:   theta <- one step of the optimizer on g with the rate lr
    delta:      theta <- theta + d

Nothing is made of the delay. N workers move the model N times as far in a clock as one does, so the learning rate is
the one of a single worker, or less: with a delay of about N - 1 on a curvature h, plain SGD is stable only below about
pi / (2 N h).

Source: Dean et al., NIPS 2012 (Downpour); Recht et al., NIPS 2011 (the same without locks, in shared memory). Where we
differ: the user's own optimizer steps, not Adagrad.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.rules.outer.arrival import Plain


@dataclass(frozen=True)
class Sum(Plain):
    """Apply each push in full."""

    def describe(self, workers: int) -> str:
        return "each push in full, as it comes"

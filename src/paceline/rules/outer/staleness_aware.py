# SPDX-License-Identifier: Apache-2.0
"""Staleness-aware: the learning rate is divided by the delay.

    rate = 1 / max(1, tau)

tau is the delay of the push. With N workers of one speed tau is N - 1 on average, and N workers move the model about as
far as one: what is gained is the noise that averages out.

Source: Zhang et al., IJCAI 2016, arXiv 1511.05950: lr / tau for tau >= 1, lr for tau = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.rules.outer.arrival import Plain, Push


@dataclass(frozen=True)
class StalenessAware(Plain):
    """Apply each push with 1/tau."""

    def rate(self, push: Push) -> float:
        """1 / max(1, tau)."""
        return 1 / max(1, push.delay)

    def describe(self, workers: int) -> str:
        return "each push as it comes, its rate divided by its delay"

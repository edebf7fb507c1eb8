# SPDX-License-Identifier: Apache-2.0
"""How many workers train: few at first, and more as they come to be worth it.

    k      <- min(N, 2 k)     after a block with  E >= theta k,  at least `blocks` blocks after the last such change
    rate_k  = rate_1 k^s      of the local optimizer, rate_1 being that of one worker

k workers train, of N that there are, and E is how many they are worth (:mod:`paceline.rules.outer.diversity`). At the
start of a training all workers find nearly the same displacement, so that many are worth little; later they differ.

Source: a batch that grows with the gradient's noise, McCandlish et al., arXiv 1812.06162, and Merrill et al., arXiv
2505.23971; s = 0.29 is the joint fit of DiLoCo's inner rate, Charles et al., arXiv 2503.09799. Where we differ: workers
in place of samples of a minibatch, and E, which block exchanges give for nothing, in place of the noise scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import RuleError

RATE_EXPONENT = 0.29
"""s."""


@dataclass(frozen=True)
class Growth:
    """A number of workers that doubles.

    >>> from paceline.rules.schedule import Growth
    >>> Growth().next(4, most=64, effective=2.7, blocks=4)  # 2.7 >= 0.65 * 4
    8

    Attributes:
        first: k of the first blocks.
        threshold: theta, above 0; larger ones trade speed for quality.
        blocks: so many at least between two changes.
    """

    first: int = 2
    threshold: float = 0.65
    blocks: int = 4

    def __post_init__(self) -> None:
        for name, least in (("first", 2), ("blocks", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise RuleError(f"{name} of a growth must be a whole number, at least {least}, got {value!r}")
        if not isinstance(self.threshold, (int, float)) or isinstance(self.threshold, bool) or not self.threshold > 0:
            raise RuleError(f"threshold of a growth must be a number above 0, got {self.threshold!r}")

    def next(self, workers: int, most: int, effective: float, blocks: int) -> int:
        """k of the next block.

        Args:
            workers: k.
            most: N.
            effective: E.
            blocks: that k workers have made.
        """
        grows = blocks >= self.blocks and effective >= self.threshold * workers
        return min(most, 2 * workers) if grows else workers


def rate_factor(workers: int) -> float:
    """rate_k / rate_1."""
    return float(workers**RATE_EXPONENT)

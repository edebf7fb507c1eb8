# SPDX-License-Identifier: Apache-2.0
"""Timed synchronous steps, after which the rule is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import RuleError
from paceline.rules.schedule.whole import is_whole

LEAST_PROBE = 4
"""Of either half of a probe the first step is not counted, while connections are set up."""


@dataclass(frozen=True)
class Probe:
    """Synchronous steps at the beginning, whose times choose the rule (:mod:`paceline.rules.choice`).

    Attributes:
        steps: of the probe; in the first half gradients are exchanged after the backward pass, then during it.
        codec: whether the codec is chosen, too.
        overlap: whether the overlap is chosen, too.
        rate: s, where synchronous steps have N^s times the learning rate of one worker.
    """

    steps: int = 10
    codec: bool = True
    overlap: bool = True
    rate: float = 0.5

    def __post_init__(self) -> None:
        if not is_whole(self.steps) or self.steps < LEAST_PROBE:
            raise RuleError(
                f"probe must be 0 (begin with blocks) or a whole number of steps, at least {LEAST_PROBE}, got "
                f"{self.steps!r}"
            )
        if not isinstance(self.rate, (int, float)) or isinstance(self.rate, bool) or not 0 <= self.rate <= 1:
            raise RuleError(f"sync_rate must be a number from 0 to 1, the exponent of N, got {self.rate!r}")

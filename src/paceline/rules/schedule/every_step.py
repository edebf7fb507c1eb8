# SPDX-License-Identifier: Apache-2.0
"""Exchange before every step of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EveryStep:
    """Lockstep: tau = 1, and what is exchanged is used in the same step."""

    warmup = 0
    period = 1
    overlap = 0

    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""
        return "every step"

# SPDX-License-Identifier: Apache-2.0
"""Exchange before every step of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.rules.schedule.base import Schedule


@dataclass(frozen=True)
class EveryStep(Schedule):
    """Lockstep: tau = 1, and what is exchanged is used in the same step."""

    sends_footer = True
    warmup = 0
    period = 1
    fragments = 1
    overlap = 0

    def is_lockstep(self, warm: bool) -> bool:
        return True

    def ends_warmup(self, steps: int) -> bool:
        """Never: there is nothing else after it."""
        return False

    def numbers(self) -> dict[str, float | int | str]:
        return {"period": self.period}

    def describe(self, workers: int) -> str:
        return "every step"

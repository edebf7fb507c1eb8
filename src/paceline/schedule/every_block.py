# SPDX-License-Identifier: Apache-2.0
"""Exchange after every block of tau minibatches, after a synchronous warm-up.

    t <  W:  exchange gradients before every step     (warm-up: the model is not yet where averaging is harmless)
    t >= W:  exchange after steps W + tau, W + 2 tau, W + 3 tau, ...

t counts one worker's steps, W is the warm-up, tau the period. Source: Chen & Huo, ICASSP 2016 (blocks); the need of a
warm start is stated in the documentation of CNTK's block momentum.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import RuleError


@dataclass(frozen=True)
class EveryBlock:
    """Blocks of `period` minibatches on each worker.

    Attributes:
        period: tau, minibatches that each worker makes between two exchanges.
        warmup: W, synchronous steps before the first block.
    """

    period: int = 16
    warmup: int = 0

    def __post_init__(self) -> None:
        if not _whole(self.period) or self.period < 1:
            raise RuleError(f"period must be a whole number of minibatches, at least 1, got {self.period!r}")
        if not _whole(self.warmup) or self.warmup < 0:
            raise RuleError(f"warmup must be a whole number of steps, at least 0, got {self.warmup!r}")

    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""
        text = f"every {self.period} minibatches"
        return f"{text}, after {self.warmup} synchronous steps" if self.warmup else text


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

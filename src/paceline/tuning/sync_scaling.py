# SPDX-License-Identifier: Apache-2.0
"""The optimizer of one worker in synchronous steps of N: its learning rate, its warm-up and its memory.

    rate_N  = min(N^s, 16) min(1, t / W) rate           s = 1 for SGD with momentum, 1/2 for others, W = 64
    beta1_N = beta1^(N^(1/3)),  beta2_N = beta2^N       of Adam and AdamW

A run of N workers has 1/N of the steps. So what an optimizer counts in steps is adapted: Adam's second moment spans as
many samples as alone, the first one fewer steps, and the rate takes W steps t to rise (records/2026-11-29_everyday).

Source: linear scaling with a warm-up for SGD, Goyal et al., arXiv 1706.02677; the root for Adam, Malladi et al., arXiv
2205.10287; beta2 by samples, Marek et al., arXiv 2507.07101. The exponent of beta1, W and the bound are ours. Plain SGD
often trains at the highest rate that is stable: N times that diverged for a small model with 16 workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import SGD, Optimizer

from paceline.core.optimizer_state import is_adam, moments, parameter_state, step_count

WARMUP = 64  # W


class SyncScaling:
    """Of N `workers`; `exponent` is s, None for that of the optimizer; one that is given has no bound."""

    def __init__(self, workers: int, exponent: float | None = None) -> None:
        self._workers, self._exponent = workers, exponent

    def highest(self, optimizer: Optimizer) -> float:
        """N^s."""
        if self._exponent is not None:
            return float(self._workers**self._exponent)
        linear = isinstance(optimizer, SGD) and any(group["momentum"] for group in optimizer.param_groups)
        return float(min(self._workers ** (1.0 if linear else 0.5), 16))

    def rate(self, optimizer: Optimizer, step: int) -> float:
        """The factor of the rate at step t, from 1."""
        return self.highest(optimizer) * min(1.0, step / WARMUP)

    def betas(self, optimizer: Optimizer, betas: Any) -> Any:
        """For one worker's betas those of a step; the same where they are not adapted."""
        if not is_adam(optimizer) or not all(isinstance(beta, float) for beta in betas):
            return betas
        return betas[0] ** (self._workers ** (1 / 3)), betas[1] ** self._workers

    def take_over(self, groups: Iterable[tuple[Optimizer, dict[str, Any]]]) -> None:
        """After steps with one worker's betas: keep the moments' means, for which Adam divides them by 1 - beta^t."""
        for optimizer, group in groups:
            own = group.get("betas", ())
            for one in group["params"] if is_adam(optimizer) else ():
                step = step_count(optimizer, [one])
                for before, after, moment in zip(own, self.betas(optimizer, own), moments(optimizer), strict=True):
                    if step and (state := parameter_state(optimizer, one, moment.key)) is not None:
                        state.mul_((1 - after**step) / (1 - before**step))

# SPDX-License-Identifier: Apache-2.0
"""How many workers train together in synchronous steps, and what becomes of their optimizer's settings.

    k_r     = N / G_r,  G_r = ceil(N / min(N, max(1, sqrt(r N / C))))      C = 3; workers in round r = 0, 1, ..
    rate_k  = min(k^s, 16) rate                                            s = 1 for SGD with momentum, else 1/2
    beta1_k = beta1^(k^(1/3)),  beta2_k = beta2^k                          of Adam and AdamW

A mean of k gradients is worth k steps only where gradients differ much, and at first they do not: the batch that pays
grows with the root of the samples. So in a round, in which each of N workers makes one step, G_r groups make theirs one
after another (:mod:`paceline.update.engine.turns`); r N minibatches were made before it. All N train together after
C N rounds, which take about 2 C N steps longer.

k workers make 1/k of the steps. So what an optimizer counts in steps is adapted: Adam's second moment spans as many
samples as alone, the first one fewer steps. Where workers cannot take turns, k is N, and the rate rises in W steps.

Source: the root of the samples, Zhang et al., arXiv 2410.21676, Merrill et al., 2505.23971; linear scaling for SGD,
Goyal et al., 1706.02677; the root for Adam, Malladi et al., 2205.10287; beta2 by samples, Marek et al., 2507.07101. C,
W, the exponent of beta1 and the bound are ours (records/2026-11-29_everyday). Plain SGD often trains at the highest
rate that is stable: N times that diverged for a small model with 16 workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch.optim import SGD, Optimizer

from paceline.core.optimizer_state import is_adam, moments, parameter_state, step_count

CRITICAL = 3  # C, minibatches
WARMUP = 64  # W, steps


class SyncScaling:
    """Of N `workers`; `exponent` is s, None for that of the optimizer, and one that is given has no bound; workers take
    turns after `began` steps of each, None if they do not."""

    def __init__(self, workers: int, exponent: float | None = None, began: int | None = None) -> None:
        self._workers, self._exponent, self._began = workers, exponent, began

    @property
    def takes_turns(self) -> bool:
        return self._began is not None

    def groups(self, step: int) -> int:
        """G of the round in which workers make this step, from 1."""
        if self._began is None:
            return 1
        made = max(0, step - 1 - self._began) * self._workers
        return math.ceil(self._workers / min(self._workers, max(1.0, math.sqrt(made / CRITICAL))))

    def speed_up(self, steps: int) -> float:
        """Of so many steps of each worker: their minibatches over those made one after another."""
        together = min(steps, self._began or 0)
        return self._workers * steps / (together + sum(map(self.groups, range(together + 1, steps + 1))))

    def highest(self, optimizer: Optimizer, together: float | None = None) -> float:
        """The factor of the rate of k workers, N by default."""
        together = self._workers if together is None else together
        if self._exponent is not None:
            return float(together**self._exponent)
        linear = isinstance(optimizer, SGD) and any(group["momentum"] for group in optimizer.param_groups)
        return float(min(together ** (1.0 if linear else 0.5), 16))

    def rate(self, optimizer: Optimizer, step: int) -> float:
        """The factor of the rate at a worker's step, from 1."""
        rises = 1.0 if self.takes_turns else min(1.0, step / WARMUP)
        return self.highest(optimizer, self._workers / self.groups(step)) * rises

    def betas(self, optimizer: Optimizer, betas: Any, step: int) -> Any:
        """For one worker's betas those of a step; the same where they are not adapted."""
        if not is_adam(optimizer) or not all(isinstance(beta, float) for beta in betas):
            return betas
        together = self._workers / self.groups(step)
        return betas[0] ** (together ** (1 / 3)), betas[1] ** together

    def take_over(self, groups: Iterable[tuple[Optimizer, dict[str, Any]]]) -> None:
        """After steps with one worker's betas: keep the moments' means, for which Adam divides them by 1 - beta^t."""
        for optimizer, group in groups:
            own = group.get("betas", ())
            for one in group["params"] if is_adam(optimizer) else ():
                step = step_count(optimizer, [one])
                for before, after, moment in zip(own, self.betas(optimizer, own, 0), moments(optimizer), strict=True):
                    if step and (state := parameter_state(optimizer, one, moment.key)) is not None:
                        state.mul_((1 - after**step) / (1 - before**step))

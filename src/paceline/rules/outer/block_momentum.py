# SPDX-License-Identifier: Apache-2.0
"""Blockwise model-update filtering (BMUF), Nesterov (NBM) and classical (CBM) block momentum.

    d_n        = mean_i theta_{t,i} - theta^init_{t-tau}      measured from where the workers started
    Delta_n    = eta_n Delta_{n-1} + zeta_n A_{n-1}^p d_n     the filtered update, Delta_0 = 0
    theta_t    = theta_{t-tau} + Delta_n                      the global model: exported, evaluated
    NBM:  theta^init_t = theta_t + eta_{n+1} Delta_n          CBM:  theta^init_t = theta_t

n counts blocks, tau minibatches of a block, eta block momentum, zeta block learning rate; A is the diversity of the
workers' displacements (:mod:`paceline.rules.outer.diversity`), with p = 0 unless `amplify` is set. With `restart`
Delta and rho begin again at 0 every R blocks (:mod:`paceline.rules.outer.restart`). Two buffers (theta and Delta) are
needed; the one-buffer "Nesterov" found in several code bases is classical momentum with rate (1+eta) zeta and moves
(2N-1) d a block where N d is right. With zeta = 1 and p = 0, NBM's theta_t is the mean of the local models.

What a filtered update stands for, in minibatches (rho), and how far the start is ahead of the mean (kv):

    rho_n = eta_n rho_{n-1} + zeta_n tau
    NBM:  kv_n = eta_{n+1} rho_n + (zeta_n - 1) tau           CBM:  kv_n = eta_n rho_{n-1} + (zeta_n - 1) tau

Source: Chen & Huo, ICASSP 2016 (filter); Chen, Ding & Huo, ICASSP 2020 (rho). Where we differ: the gain follows N less
than linearly by default (:mod:`paceline.rules.outer.gain`), and eta may be ramped up over the first blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core import kernels
from paceline.rules.outer.base import Coefficients, State, written
from paceline.rules.outer.diversity import check_power
from paceline.rules.outer.gain import check_gain, check_numbers, eta_zeta, gain_in_words, momentum_of
from paceline.rules.outer.restart import check_restart, restarts


@dataclass(frozen=True)
class BlockMomentum:
    """Block momentum.

    Attributes:
        momentum: eta; None derives it from the gain.
        lr: zeta; None derives it from the gain.
        gain: "auto" (N^(0.7 - p/2), less in the first blocks), "paper" (eta = 1 - 1/N, zeta = 1) or a number, zeta
            / (1 - eta).
        nesterov: True for NBM, False for CBM.
        ramp: blocks over which eta rises linearly from 0.
        amplify: p, from 0 to 1.
        restart: R, blocks after which Delta is set to 0; 0 for never.
    """

    tensors = ("delta",)

    momentum: float | None = None
    lr: float | None = None
    gain: float | str = "auto"
    nesterov: bool = True
    ramp: int = 0
    amplify: float = 0.0
    restart: int = 0

    def __post_init__(self) -> None:
        check_gain(self.gain)
        check_numbers(self.momentum, self.lr, self.ramp)
        check_power(self.amplify)
        check_restart(self.restart)
        if not isinstance(self.gain, str):
            self._numbers(2)  # a gain in numbers does not depend on N

    def _numbers(self, workers: int) -> tuple[float, float]:
        paper = (1 - 1 / workers, 1.0)
        return eta_zeta(workers, self.momentum, self.lr, self.gain, paper, self.amplify)

    @property
    def _grows(self) -> bool:
        """Whether the gain is the default's, which grows with the blocks."""
        return self.gain == "auto" and self.momentum is None

    def momentum_at(self, block: int, workers: int) -> float:
        """eta_n."""
        return momentum_of(block, *self._numbers(workers), grows=self._grows, ramp=self.ramp)

    def lr_at(self, block: int, workers: int) -> float:
        """zeta_n."""
        return self._numbers(workers)[1]

    def origin(self, anchor: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        """theta^init of the block that ended; the same operation as the look-ahead, hence the same bits."""
        if not self.nesterov:
            return anchor
        return torch.add(anchor, state["delta"], alpha=c.ahead, out=out)

    def step(self, anchor: Tensor, merged: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        """One block: Delta, theta, and the next start."""
        delta = state["delta"]
        if kernels.serve(anchor, merged, delta, out):
            return self._fused(anchor, merged, delta, c, out)
        delta.mul_(c.momentum).add_(merged, alpha=c.lr * c.diversity**self.amplify)
        anchor.add_(delta)
        if restarts(self.restart, c.block):
            delta.zero_()
        if not self.nesterov:
            return anchor
        return torch.add(anchor, delta, alpha=c.next_momentum, out=out)

    def _fused(self, anchor: Tensor, merged: Tensor, delta: Tensor, c: Coefficients, out: Tensor) -> Tensor:
        """The same in one kernel."""
        from paceline.core.kernels.momentum import Factors, step

        again = restarts(self.restart, c.block)
        ahead = (0.0 if again else c.next_momentum) if self.nesterov else None
        start = step(anchor, merged, delta, Factors(c.momentum, c.lr * c.diversity**self.amplify, 1.0, 0.0, ahead), out)
        if again:
            delta.zero_()
        return start

    def equivalent_minibatches(self, rho: float, tau: float, c: Coefficients) -> tuple[float, float]:
        """(rho_n, kv_n); kv is never below 0."""
        now = c.momentum * rho + c.lr * tau
        kept = 0.0 if restarts(self.restart, c.block) else now
        ahead = c.next_momentum * kept if self.nesterov else c.momentum * rho
        return kept, max(0.0, ahead + (c.lr - 1) * tau)

    def describe(self, workers: int) -> str:
        eta, zeta = self._numbers(workers)
        kind = "Nesterov" if self.nesterov else "classical"
        words = gain_in_words(eta, zeta, grows=self._grows)
        strength = f", amplified by diversity^{self.amplify:g}" if self.amplify else ""
        again = f", restarted every {self.restart} blocks" if self.restart else ""
        return f"{kind} block momentum, eta {eta:.3g}, zeta {zeta:.3g} ({words}){strength}{again}"

    def __repr__(self) -> str:
        return written(self, "amplify", "restart")

# SPDX-License-Identifier: Apache-2.0
"""Blockwise model-update filtering (BMUF), Nesterov (NBM) and classical (CBM) block momentum.

    d_n        = mean_i theta_{t,i} - theta^init_{t-tau}      measured from where the workers started
    Delta_n    = eta_n Delta_{n-1} + zeta_n A_{n-1}^p d_n     the filtered update, Delta_0 = 0
    theta_t    = theta_{t-tau} + Delta_n                      the global model: exported, evaluated
    NBM:  theta^init_t = theta_t + eta_{n+1} Delta_n          CBM:  theta^init_t = theta_t

n counts blocks, tau minibatches of a block, eta block momentum, zeta block learning rate; A is the diversity of the
workers' displacements (:mod:`paceline.rules.outer.diversity`), with p = 0 unless `amplify` is set. Two buffers (theta
and Delta) are needed; the one-buffer "Nesterov" of several code bases is classical momentum with rate (1+eta) zeta and
moves (2N-1) d a block where N d is right. With zeta = 1 and p = 0, NBM's theta_t is the mean of the local models.

What a filtered update is worth, in minibatches (rho), and how far the start is ahead of the mean (kv):

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
from paceline.rules.outer.gain import MomentumStep


@dataclass(frozen=True)
class BlockMomentum(MomentumStep):
    """Block momentum.

    Attributes:
        momentum: eta; None derives it from the gain.
        lr: zeta; None derives it from the gain.
        gain: "auto" (N^(0.7 - p/2), less in the first blocks), "paper" (eta = 1 - 1/N, zeta = 1) or a number, zeta
            / (1 - eta).
        nesterov: True for NBM, False for CBM.
        ramp: blocks over which eta rises linearly from 0.
        amplify: p, from 0 to 1.
    """

    tensors = ("delta",)

    momentum: float | None = None
    lr: float | None = None
    gain: float | str = "auto"
    nesterov: bool = True
    ramp: int = 0
    amplify: float = 0.0

    def origin(self, anchor: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        """theta^init of the block that ended; the same operation as the look-ahead, hence the same bits."""
        if not self.nesterov:
            return anchor
        return torch.add(anchor, state["delta"], alpha=c.ahead, out=out)

    def step(self, anchor: Tensor, merged: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        """One block: Delta, theta, and the next start."""
        delta = state["delta"]
        if anchor.is_cuda and kernels.serve(anchor, merged, delta, out):
            from paceline.core.kernels.blocks import Factors, step

            ahead = c.next_momentum if self.nesterov else None
            factors = Factors(c.momentum, c.lr * c.diversity**self.amplify, 1.0, 0.0, ahead)
            return step(anchor, merged, delta, factors, out)
        delta.mul_(c.momentum).add_(merged, alpha=c.lr * c.diversity**self.amplify)
        anchor.add_(delta)
        if not self.nesterov:
            return anchor
        return torch.add(anchor, delta, alpha=c.next_momentum, out=out)

    def equivalent_minibatches(self, rho: float, tau: float, c: Coefficients) -> tuple[float, float]:
        """(rho_n, kv_n); kv is never below 0."""
        now = c.momentum * rho + c.lr * tau
        ahead = c.next_momentum * now if self.nesterov else c.momentum * rho
        return now, max(0.0, ahead + (c.lr - 1) * tau)

    def describe(self, workers: int) -> str:
        eta, zeta = self.eta_zeta(workers)
        kind = "Nesterov" if self.nesterov else "classical"
        strength = f", amplified by diversity^{self.amplify:g}" if self.amplify else ""
        return f"{kind} block momentum, eta {eta:.3g}, zeta {zeta:.3g} ({self.gain_in_words(workers)}){strength}"

    def __repr__(self) -> str:
        return written(self, "amplify")

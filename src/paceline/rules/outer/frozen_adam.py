# SPDX-License-Identifier: Apache-2.0
"""Adam with a frozen second moment, which makes its update linear in the first (1-bit Adam).

    m       = mean_i m_i                                 what was exchanged
    theta   = theta - lr ( mhat / (sqrt(vhat) + eps) + wd theta )
    mhat    = m / (1 - b1^k),        vhat = v_Tw / (1 - b2^Tw)

k counts steps, T_w is the last one before v was frozen, wd is AdamW's decoupled weight decay (Adam's own enters the
gradient). Because v does not change, an error of m that is fed back comes back undistorted.

Source: Tang et al., arXiv 2102.02888. Where we differ: the bias corrections of Adam go on, so that nothing jumps when v
is frozen; and a number whose v is 0 (it never had a gradient) stays where it is, because what a codec smears onto it
would be divided by eps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.rules.outer.average import Average


@dataclass(frozen=True)
class FrozenAdam(Average):
    """The mean first moment over the root of a frozen second moment."""

    def describe(self, workers: int) -> str:
        return "Adam's step with the second moment frozen"


@torch.no_grad()
def frozen_step(
    parameter: Tensor, m: Tensor, v: Tensor, group: Mapping[str, Any], *, decay: float, step: int, frozen_at: float
) -> None:
    """One step, in place.

    Args:
        parameter: theta, any shape.
        m: the workers' mean first moment, the same shape.
        v: the second moment as it was frozen, the same shape.
        group: Adam's parameter group, with lr, betas and eps.
        decay: AdamW's decoupled weight decay, 0 for Adam.
        step: k, from 1.
        frozen_at: T_w.
    """
    if parameter.is_complex():  # two real numbers, as for Adam
        parameter, m, v = (torch.view_as_real(tensor) for tensor in (parameter, m, v))
    lr, betas, eps = float(group["lr"]), group["betas"], float(group["eps"])
    root = v.div(1 - betas[1] ** frozen_at).sqrt_()
    update = torch.where(root > 0, m / (1 - betas[0] ** step) / (root + eps), 0.0)
    if decay:
        parameter.mul_(1 - lr * decay)
    parameter.add_(update.to(parameter.dtype), alpha=-lr)

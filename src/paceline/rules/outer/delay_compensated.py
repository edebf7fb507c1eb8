# SPDX-License-Identifier: Apache-2.0
"""Delay compensation (DC-ASGD): the stale gradient is brought to where the model is now.

    g    <- g + lam_t g g (w - w_bak)                                  all element-wise
    constant:   lam_t = lam0
    adaptive:   MS <- decay MS + (1 - decay) g g,    lam_t = lam0 / sqrt(MS + 1e-7)

w are the values now, w_bak those at which the worker computed g (copied when it pulled them), MS a moving average, one
for a shard and all workers, updated before use. It is the first-order term of g(w) = g(w_bak) + H (w - w_bak)
with the diagonal of g g^T for H, which is unbiased for a log-likelihood near its optimum; lam below 1 gives bias for
variance. A mean over B samples has g g of about H / B besides the squared mean, so lam0 grows with B.

The correction is g (lam_t g (w - w_bak)): where lam_t |g (w - w_bak)| passes 1, it can turn the element's sign. `limit`
bounds that factor: a correction of at most limit |g|.

Source: Zheng et al., ICML 2017, arXiv 1609.08326; lam0 = 0.04 (constant) and lam0 = 2, decay = 0.95 (adaptive) are
those of the authors' code for CIFAR-10. Where we differ from that code, with the publication: the backup is made at the
pull and never at the push, and MS is not kept for each worker. `limit` is ours, and off by default.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import RuleError
from paceline.rules.outer.arrival import Plain, Push, is_number
from paceline.rules.outer.base import State

STRENGTH = {"constant": 0.04, "adaptive": 2.0}
EPS = 1e-7


@dataclass(frozen=True)
class DelayCompensated(Plain):
    """Mend each gradient by its delay.

    Attributes:
        kind: "constant" or "adaptive".
        strength: lam0; None for 0.04 (constant) or 2 (adaptive).
        decay: of the moving average of squares, from 0 to below 1; for "adaptive".
        limit: the largest correction of an element as a share of it; None for no limit.
    """

    needs_origin = True  # w_bak

    kind: str = "constant"
    strength: float | None = None
    decay: float = 0.95
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in STRENGTH:
            raise RuleError(f"kind must be one of {', '.join(STRENGTH)}, got {self.kind!r}")
        if self.strength is not None and not (is_number(self.strength) and self.strength >= 0):
            raise RuleError(f"strength must be a number, at least 0, or None, got {self.strength!r}")
        if not (is_number(self.decay) and 0 <= self.decay < 1):
            raise RuleError(f"decay must be a number from 0 to below 1, got {self.decay!r}")
        if self.limit is not None and not (is_number(self.limit) and self.limit > 0):
            raise RuleError(f"limit must be a number above 0, or None, got {self.limit!r}")

    @property
    def tensors(self) -> tuple[str, ...]:
        """MS, where lam is adaptive."""
        return ("squares",) if self.kind == "adaptive" else ()

    @property
    def lam0(self) -> float:
        """The strength in numbers."""
        return STRENGTH[self.kind] if self.strength is None else float(self.strength)

    @torch.no_grad()
    def mend(self, gradient: Tensor, anchor: Tensor, origin: Tensor | None, state: State, push: Push) -> None:
        """g (1 + lam g (w - w_bak)); so written, a gradient without a delay keeps its bits."""
        assert origin is not None
        share = torch.sub(anchor, origin).mul_(gradient).mul_(self.lam0)
        if self.kind == "adaptive":
            squares = state["squares"].mul_(self.decay).addcmul_(gradient, gradient, value=1 - self.decay)
            share.div_(squares.add(EPS).sqrt_())
        if self.limit is not None:
            share.clamp_(-self.limit, self.limit)
        gradient.mul_(share.add_(1))

    def numbers(self, workers: int) -> dict[str, float | int | str]:
        """lam0, the decay and the limit."""
        found: dict[str, float | int | str] = {"strength": self.lam0}
        if self.kind == "adaptive":
            found["decay"] = self.decay
        return found | ({} if self.limit is None else {"limit": self.limit})

    def describe(self, workers: int) -> str:
        return f"each push as it comes, its gradient mended by its delay ({self.kind}, strength {self.lam0:g})"

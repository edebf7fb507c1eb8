# SPDX-License-Identifier: Apache-2.0
"""Delay compensation (DC-ASGD): the stale gradient is brought to where the model is now.

    g    <- g + lam_t g g (w - w_bak)                                  all element-wise
    constant:   lam_t = lam0
    adaptive:   MS <- decay MS + (1 - decay) g g,    lam_t = lam0 / sqrt(MS + 1e-7)
    normalized: MS as in adaptive,                   lam_t = lam0 / (MS + 1e-12)

w are the values now, w_bak those at which the worker computed g (copied when it pulled them), MS a moving average, one
for a shard and all workers, updated before use. It is the first-order term of g(w) = g(w_bak) + H (w - w_bak)
with the diagonal of g g^T for H, which is unbiased for a log-likelihood near its optimum; lam below 1 gives bias for
variance. A mean over B samples has g g of about H / B besides the squared mean, so lam0 grows with B.

g falls during training, and the Hessian much less: the lam that fits grows with 1 / g g. `normalized` follows that, as
the normalized LMS filter divides by its input's power. Its lam0 g g / MS is lam0 in the mean: a curvature that does not
depend on how long gradients are.

The expansion holds while w and w_bak are near to each other, so when the rate is low: before `start` nothing is
compensated (MS is kept), and the rule is `asgd` bit by bit.

The correction is g (lam_t g (w - w_bak)): where lam_t |g (w - w_bak)| passes 1, it can turn the element's sign. `limit`
bounds that factor: a correction of at most limit |g|.

Source: Zheng et al., ICML 2017, arXiv 1609.08326; lam0 = 0.04 (constant) and lam0 = 2, decay = 0.95 (adaptive) are
those of the authors' code for CIFAR-10. That compensation belongs to the second half of training, where the rate is
low, is the authors' advice. Where we differ from that code, with the publication: the backup is made at the pull and
never at the push, and MS is not kept for each worker. `normalized`, `limit` and `start` are ours, and off by default.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.parse import check, check_number, is_number
from paceline.rules.outer.arrival import Arrival, Push
from paceline.rules.outer.base import State, written

STRENGTH = {"constant": 0.04, "adaptive": 2.0, "normalized": 0.25}
EPS, NORMALIZED_EPS = 1e-7, 1e-12


@dataclass(frozen=True)
class DelayCompensated(Arrival):
    """Mend each gradient by its delay.

    Attributes:
        kind: "constant", "adaptive" or "normalized".
        strength: lam0; None for 0.04 (constant), 2 (adaptive) or 0.25 (normalized).
        decay: of the moving average of squares, from 0 to below 1; not for "constant".
        limit: the largest correction of an element as a share of it; None for no limit.
        start: updates of the shard before the first that is compensated (an int), or the fraction of its highest
            learning rate, between 0 and 1, at or below which gradients are compensated.
    """

    needs_origin = True  # w_bak

    kind: str = "constant"
    strength: float | None = None
    decay: float = 0.95
    limit: float | None = None
    start: int | float = 0

    def __repr__(self) -> str:
        return written(self, "start")

    def __post_init__(self) -> None:
        check(self.kind in STRENGTH, "kind", f"one of {', '.join(STRENGTH)}", self.kind)
        strength, limit, start = self.strength, self.limit, self.start
        fits = strength is None or (is_number(strength) and strength >= 0)
        check(fits, "strength", "a number, at least 0, or None", strength)
        check_number("decay", self.decay, 0, 1)
        check(limit is None or (is_number(limit) and limit > 0), "limit", "a number above 0, or None", limit)
        fits = is_number(start) and (start >= 0 if isinstance(start, int) else 0 < start < 1)
        wanted = "a whole number of updates, at least 0, or a fraction of the highest learning rate, between 0 and 1"
        check(fits, "start", wanted, start)

    @property
    def tensors(self) -> tuple[str, ...]:
        """MS, where lam follows it."""
        return () if self.kind == "constant" else ("squares",)

    @property
    def lam0(self) -> float:
        """The strength in numbers."""
        return STRENGTH[self.kind] if self.strength is None else float(self.strength)

    def started(self, push: Push) -> bool:
        """Whether this push is compensated."""
        if isinstance(self.start, int):
            return push.update > self.start
        return push.lr <= self.start * push.highest_lr

    @torch.no_grad()
    def mend(self, gradient: Tensor, anchor: Tensor, origin: Tensor | None, state: State, push: Push) -> None:
        """g (1 + lam g (w - w_bak)); so written, a gradient without a delay keeps its bits."""
        assert origin is not None
        if self.kind != "constant":
            state["squares"].mul_(self.decay).addcmul_(gradient, gradient, value=1 - self.decay)
        if not self.started(push):
            return
        share = torch.sub(anchor, origin).mul_(gradient).mul_(self.lam0)
        if self.kind == "adaptive":
            share.div_(state["squares"].add(EPS).sqrt_())
        elif self.kind == "normalized":
            share.div_(state["squares"].add(NORMALIZED_EPS))
        if self.limit is not None:
            share.clamp_(-self.limit, self.limit)
        gradient.mul_(share.add_(1))

    def numbers(self, workers: int) -> dict[str, float | int | str]:
        """lam0, and what else was chosen."""
        shown: dict[str, float | int | str] = {"strength": self.lam0}
        if self.kind != "constant":
            shown["decay"] = self.decay
        if self.limit is not None:
            shown["limit"] = self.limit
        return shown | ({"start": self.start} if self.start else {})

    def describe(self, workers: int) -> str:
        text = f"each push as it comes, its gradient mended by its delay ({self.kind}, strength {self.lam0:g})"
        if not self.start:
            return text
        if isinstance(self.start, int):
            return f"{text} after {self.start:,} updates"
        return f"{text} once the learning rate is at most {self.start:g} of its highest"

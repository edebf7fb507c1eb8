# SPDX-License-Identifier: Apache-2.0
"""What a late gradient misses, and how much of that each correction can put back, during trainings with `asgd`.

In windows of updates along the training the gradient of each pushed minibatch is taken at the present values, too. The
change g(w) - g(w_bak) is what a correction c should be. The strength that fits a window best is <c, change> / <c, c>,
and the share of the change (its square, summed) that then goes away is <c, change>^2 / (<c, c> <change, change>).
"""

from __future__ import annotations

from typing import Any

import torch
from _stale_stack import Stack, gradients, hessian_times
from torch import Tensor

from paceline.rules.outer import DelayCompensated
from paceline.rules.outer.arrival import Push

KINDS = {kind: DelayCompensated(kind, strength=1.0) for kind in ("constant", "adaptive", "normalized")}


def fit(sums: Tensor) -> dict[str, float]:
    """Of <c, change>, <c, c>, <change, change>."""
    along, own, change = (float(one) for one in sums)
    return {"strength": along / own, "share": along * along / (own * change)}


class Probe:
    """Follows a stack of rows with `asgd`."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._states = {kind: [self._state(outer) for _ in stack.rows] for kind, outer in KINDS.items()}

    def _state(self, outer: DelayCompensated) -> dict[str, Tensor]:
        return {name: torch.zeros_like(self._stack.values[0]) for name in outer.tensors}

    def _corrections(self, pushed: Tensor, now: Tensor, origins: Tensor) -> dict[str, Tensor]:
        """Of strength 1, (rows, n) each; the running means go on."""
        found = {}
        for kind, outer in KINDS.items():
            mended = pushed.clone()
            for k, state in enumerate(self._states[kind]):
                outer.mend(mended[k], now[k], origins[k], state, Push(1, 1, 1, 0.0))
            found[kind] = mended.sub_(pushed)
        return found

    def pass_by(self, updates: int) -> None:
        """Train without measuring."""
        for _ in range(updates):
            now = self._stack.values.clone()
            pushed, origins, _ = self._stack.step()
            self._corrections(pushed, now, origins)

    def window(self, updates: int) -> list[dict[str, Any]]:
        """Train and measure; one line for each row."""
        names = [*KINDS, "hessian"]
        sums = {name: torch.zeros(len(self._stack.rows), 3, dtype=torch.float64) for name in names}
        lengths = torch.zeros(len(self._stack.rows), 2, dtype=torch.float64)
        begun = self._stack.update
        for _ in range(updates):
            now = self._stack.values.clone()
            pushed, origins, batch = self._stack.step()
            change = (gradients(now, *batch, self._stack.outputs) - pushed).double()
            found = self._corrections(pushed, now, origins)
            found["hessian"] = hessian_times(origins, now - origins, *batch, self._stack.outputs)
            for name, each in found.items():
                c = each.double()
                sums[name] += torch.stack([(c * change).sum(1), (c * c).sum(1), (change * change).sum(1)], 1)
            lengths += torch.stack([pushed.double().square().sum(1), change.square().sum(1)], 1)
        return [
            {
                "update": begun + updates // 2,
                "change": float((lengths[k, 1] / lengths[k, 0]).sqrt()),
                "fit": {name: fit(sums[name][k]) for name in names},
            }
            for k in range(len(self._stack.rows))
        ]

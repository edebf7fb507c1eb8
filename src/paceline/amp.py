# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: a step that the GradScaler skips is no step, and under a gradient payload all skip it together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def skipped(optimizer: Optimizer) -> bool:
    """Whether the step that just ended did nothing: fused optimizers skip inside, and say so in `found_inf`."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item() if hasattr(found, "item") else found)


class ScalerHook:
    """Exchanges gradients before the scaler looks at them, so that every worker sees the same inf.

    The scaler's own `unscale_` and `step` are wrapped on this one object; `remove` puts them back.

    Args:
        scaler: a `torch.amp.GradScaler`.
        exchange: optimizer -> exchanges its (scaled) gradients; called once a step.
        ours: optimizer -> whether it belongs to this run and gradients are due.
    """

    def __init__(self, scaler: Any, exchange: Callable[[Optimizer], None], ours: Callable[[Optimizer], bool]) -> None:
        self._scaler, self._exchange, self._ours = scaler, exchange, ours
        self._unscale, self._step = scaler.unscale_, scaler.step
        self.done: set[int] = set()
        scaler.unscale_, scaler.step = self._on_unscale, self._on_step

    def _once(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self.done and self._ours(optimizer):
            self.done.add(id(optimizer))
            self._exchange(optimizer)

    def _on_unscale(self, optimizer: Optimizer) -> None:
        self._once(optimizer)
        self._unscale(optimizer)

    def _on_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._once(optimizer)
        try:
            return self._step(optimizer, *args, **kwargs)
        finally:
            self.done.discard(id(optimizer))

    def remove(self) -> None:
        """Give the scaler back as it was."""
        for name in ("unscale_", "step"):
            self._scaler.__dict__.pop(name, None)

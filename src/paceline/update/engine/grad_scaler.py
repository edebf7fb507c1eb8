# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: a step that the GradScaler skips does not count; under a gradient payload all workers skip it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule

DEPTH = 20
"""Frames between a scaler's step and the hook of the optimizer's step, at most."""


def is_scaler(thing: Any) -> bool:
    return issubclass(type(thing), GradScaler) and bool(thing.is_enabled())


def stepping_scaler() -> Any:
    """The GradScaler that makes the step in whose hook this is called; None if the program steps itself."""
    frame = sys._getframe(1)
    for _ in range(DEPTH):
        if frame is None:
            return None
        if frame.f_code.co_name in ("step", "_maybe_opt_step"):
            owner = frame.f_locals.get("self")
            if is_scaler(owner):
                return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


class Scaling:
    """The GradScaler of an optimizer's gradients, and its scale.

    If gradients are sent in backward, the user need not pass the scaler: it is known from its first step. Before that,
    any live enabled scaler is assumed to be it (searched for only when gradients are not finite).
    """

    def __init__(self, scaler: Any = None) -> None:
        self.scaler, self._sure = scaler, scaler is not None
        self.kept_at: float | None = None  # the scale of the codecs' residuals; None if unknown

    @property
    def active(self) -> bool:
        """Whether a scaler handles gradients that are not finite."""
        if self._sure:
            return self.scaler is not None and bool(self.scaler.is_enabled())
        return any(is_scaler(thing) and thing._scale is not None for thing in gc.get_objects())

    def stepped_by(self, scaler: Any) -> None:
        """A step is made by this scaler, or by the program itself (None)."""
        if scaler is not None and not self._sure:
            self.kept_at = float(scaler.get_scale())
        self.scaler, self._sure = scaler, True

    def keep_at(self, scale: float | None) -> None:
        """The codecs' residuals come from a checkpoint, at this scale."""
        self.kept_at = scale

    def follow(self, kept: Iterable[dict[str, Tensor]]) -> None:
        """Rescale the codecs' residuals to the scale of the present gradients."""
        states = list(kept)
        if not states:
            return
        now = float(self.scaler.get_scale()) if self.scaler is not None else None
        if now is not None and self.kept_at is not None and now != self.kept_at:
            for state in states:
                for tensor in state.values():
                    tensor.mul_(now / self.kept_at)
        self.kept_at = now


class ScalerHook:
    """Exchanges gradients before the scaler checks them, so that every worker sees the same inf.

    Wraps `unscale_` and `step` of this one scaler; `remove` restores them.

    Args:
        exchange: optimizer -> exchanges its (scaled) gradients; called once a step.
        ours: optimizer -> whether it belongs to this run and gradients are due.
        over: called with the optimizer when its step is over or was skipped.
    """

    def __init__(
        self,
        scaler: Any,
        exchange: Callable[[Optimizer], None],
        ours: Callable[[Optimizer], bool],
        over: Callable[[Optimizer], None],
    ) -> None:
        self._scaler, self._exchange, self._ours, self._over = scaler, exchange, ours, over
        self._unscale, self._step = scaler.unscale_, scaler.step
        self.done: set[int] = set()
        vars(scaler).update(unscale_=self._on_unscale, step=self._on_step)

    def _once(self, optimizer: Optimizer) -> None:
        if self._scaler.is_enabled() and id(optimizer) not in self.done and self._ours(optimizer):
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
            if id(optimizer) in self.done:
                self.done.discard(id(optimizer))
                self._over(optimizer)

    def remove(self) -> None:
        for name in ("unscale_", "step"):
            vars(self._scaler).pop(name, None)


def check_scaler(rule: Rule, scaler: Any) -> None:
    """Refuse a scaler whose inf check would follow the step that the rule makes."""
    if rule.payload.moments_after is not None and scaler is not None:
        raise UnsupportedError(
            f"{rule.text()} makes Adam's step itself, where a GradScaler cannot skip it; train in bfloat16 without a "
            "scaler, or use the rule one_bit"
        )


def refuse_hidden_scaler(rule: Rule, scaler: Any, landed: bool) -> None:
    """Refuse a step of a GradScaler that was not passed to attach, unless gradients were exchanged in backward: it
    would skip steps on some workers only, and their peers would wait for ever."""
    check_scaler(rule, scaler)
    if not landed:
        raise UnsupportedError(
            "the step is taken by a GradScaler, and this rule exchanges gradients: workers have to skip a step "
            "together. Give the scaler to paceline: attach(model, optimizer, scaler=scaler, ...)"
        )

# SPDX-License-Identifier: Apache-2.0
"""Clients that push gradients and pull parameters; the optimizer steps at the owners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.rules.schedule.bounded import Bounded
from paceline.update.exchange.checksum import is_sampled
from paceline.update.server.client import Client, ClientContext
from paceline.update.server.prefetch import PullTiming
from paceline.update.server.protocol import PendingExchange
from paceline.update.server.sharding import GradientAccumulator, Span


class GradientClient(Client):
    """Pushes gradients and pulls parameters; `optimizer` finds no gradients, so that its own step does nothing."""

    def __init__(
        self,
        optimizer: Optimizer,
        context: ClientContext,
        schedule: Bounded,
        spans: list[Span],
        buffers: list[Span],
    ) -> None:
        super().__init__(context, schedule, spans, buffers)
        self._accumulators = [
            GradientAccumulator(span, pool) for span, pool in zip(self.spans, self._pools, strict=True)
        ]
        self._parameters = [p for span in self.spans for p in span.fragment.tensors]
        self._optimizer = optimizer
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._pull_timing = PullTiming()
        self._began = self._service.now()

    @property
    def _waiting(self) -> int:
        return self._accumulators[0].minibatches if self._accumulators else 0

    def before_step(self) -> None:
        """Exchange the gradients of a minibatch, and hide them from the optimizer."""
        self._pull_timing.computed(self._service.now() - self._began)
        if not self._waiting:  # all gradients until the next push are computed at these values
            for span in self.spans:
                span.note_version()
        self._unscale()
        self._gather()
        self._exchange()
        self._hide()

    def changed(self) -> list[str]:
        """The parameters that do not hold what was pulled last; on an accelerator looked for now and then."""
        spans = [one for one in self.spans if one.fragment.device.type == "cpu" or is_sampled(self.clock)]
        return [name for span in spans for name in span.changed()]

    def _gather(self) -> None:
        if self._waiting and not all(accumulator.incoming_finite() for accumulator in self._accumulators):
            self._tally.refused += 1  # and keep what was gathered before
            return
        for accumulator in self._accumulators:
            accumulator.add()
        if not all(accumulator.finite() for accumulator in self._accumulators):
            self._drop()

    def skip_step(self) -> None:
        """Advance the clock for a minibatch whose gradients must not be used."""
        for span, accumulator in zip(self.spans, self._accumulators, strict=True):
            span.note_version()
            accumulator.add()
            accumulator.fill_nan()
        self._exchange()

    @torch.no_grad()
    def _unscale(self) -> None:
        """Divide by the GradScaler's scale, as a fused optimizer does inside its step, which the owners make."""
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is not None:
            for gradient in [p.grad for p in self._parameters if p.grad is not None]:
                gradient.div_(scale)

    def _drop(self) -> None:
        """Drop inf or nan; under a bound push nan, which the owners refuse, so that the clock advances."""
        if self._schedule.staleness is not None:
            for accumulator in self._accumulators:
                accumulator.fill_nan()
            return
        self._tally.refused += 1
        for accumulator in self._accumulators:
            accumulator.reset()

    def _exchange(self) -> None:
        self._collect(wait=self._waiting >= self._schedule.hold)
        if self._pending is None and self._waiting:
            if self._schedule.overlap:
                self._unanswered = self._push_gathered(answered=False)
                self._pull_later()
            else:
                self._pending = self._push_gathered(answered=True)
                self._collect(wait=True)
        self._began = self._service.now()

    def _push_gathered(self, answered: bool) -> PendingExchange:
        minibatches = self._waiting
        return self._push([accumulator.mean() for accumulator in self._accumulators], minibatches, answered)

    def _pull_later(self) -> None:
        """Pull so late that the values are fresh (:mod:`.prefetch`)."""
        self._pending = self._bare_pull()
        self._pull_now = self._service.exchange_later(self._pending, self._pull_timing.lead)

    def _answered(self, pending: PendingExchange) -> None:
        self._pull_timing.answered(pending.answered_at - pending.requested_at)

    def restart_timing(self) -> None:
        self._began = self._service.now()

    def _hide(self) -> None:
        self._hidden = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def after_step(self) -> None:
        """Give the hidden gradients back."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def _apply(self) -> None:
        for span in self.spans:
            span.write(span.pulled)

    def flush(self) -> None:
        self._collect(wait=True)
        if self._waiting:
            self._pending = self._push_gathered(answered=True)
            self._collect(wait=True)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "pace": self._pull_timing.state()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._pull_timing.load(state["pace"])

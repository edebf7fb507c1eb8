# SPDX-License-Identifier: Apache-2.0
"""Gradients are pushed, parameters pulled; the optimizer steps at the owners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.rules.schedule.bounded import Bounded
from paceline.update.server.client import Client, ClientContext
from paceline.update.server.prefetch import PullTiming
from paceline.update.server.protocol import PendingExchange
from paceline.update.server.sharding import GradientAccumulator, Span


class GradientClient(Client):
    """Gradients are pushed, parameters pulled; the optimizer steps at the owners.

    Args:
        optimizer: whose own step is passed over.
        context, schedule, spans, buffers: as of every client.
    """

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
        self._pace = PullTiming()
        self._began = self._service.now()

    @property
    def _waiting(self) -> int:
        return self._accumulators[0].minibatches if self._accumulators else 0

    def before_step(self) -> None:
        """The gradients of a minibatch are there; afterwards the optimizer finds none."""
        self._pace.computed(self._service.now() - self._began)
        if not self._waiting:  # all that is gathered until the next push is computed at these values
            for span in self.spans:
                span.mark()
        self._unscale()
        self._gather()
        self._exchange()
        self._hide()

    def _gather(self) -> None:
        if self._waiting and not all(accumulator.incoming_finite() for accumulator in self._accumulators):
            self._tally.refused += 1  # what was gathered before is not to suffer
            return
        for accumulator in self._accumulators:
            accumulator.add()
        if not all(accumulator.finite() for accumulator in self._accumulators):
            self._drop()

    def skip_step(self) -> None:
        """A minibatch whose gradients are not to be used: only the clock goes on."""
        for span, accumulator in zip(self.spans, self._accumulators, strict=True):
            span.mark()
            accumulator.add()
            accumulator.fill_nan()
        self._exchange()

    @torch.no_grad()
    def _unscale(self) -> None:
        """A fused optimizer takes the GradScaler's scale off inside its step, which happens elsewhere."""
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is not None:
            for gradient in [p.grad for p in self._parameters if p.grad is not None]:
                gradient.div_(scale)

    def _drop(self) -> None:
        """Inf or nan: nothing of it is pushed, but where others wait for this worker, its clock has to go on."""
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
                self._silent = self._push_gathered(answered=False)
                self._ask_late()
            else:
                self._pending = self._push_gathered(answered=True)
                self._collect(wait=True)
        self._began = self._service.now()

    def _push_gathered(self, answered: bool) -> PendingExchange:
        minibatches = self._waiting
        return self._push([accumulator.mean() for accumulator in self._accumulators], minibatches, answered)

    def _ask_late(self) -> None:
        """Ask for values so late that they are fresh."""
        self._pending = self._question()
        self._hurry = self._service.exchange_later(self._pending, self._pace.lead)

    def _answered(self, pending: PendingExchange) -> None:
        self._pace.answered(pending.answered_at - pending.requested_at)

    def restart_timing(self) -> None:
        self._began = self._service.now()

    def _hide(self) -> None:
        self._hidden = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def after_step(self) -> None:
        """Give the gradients back."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def _land(self) -> None:
        for span in self.spans:
            span.write(span.pulled)

    def flush(self) -> None:
        self._collect(wait=True)
        if self._waiting:
            self._pending = self._push_gathered(answered=True)
            self._collect(wait=True)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "pace": self._pace.state()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._pace.load(state["pace"])

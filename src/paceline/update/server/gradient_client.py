# SPDX-License-Identifier: Apache-2.0
"""Gradients are pushed, parameters pulled; the optimizer steps at the owners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.update.server.client import Stream
from paceline.update.server.prefetch import Pace
from paceline.update.server.protocol import Ticket
from paceline.update.server.sharding import Gathered


class GradientStream(Stream):
    """Gradients are pushed, parameters pulled; the optimizer steps at the owners.

    Args:
        optimizer: whose own step is passed over.
    """

    def __init__(self, optimizer: Optimizer, *args: Any) -> None:
        super().__init__(*args)
        self._gathered = [Gathered(span, rooms) for span, rooms in zip(self.spans, self._rooms, strict=True)]
        self._parameters = [p for span in self.spans for p in span.fragment.tensors]
        self._optimizer = optimizer
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._pace = Pace()
        self._began = self._service.now()

    @property
    def _waiting(self) -> int:
        return self._gathered[0].minibatches if self._gathered else 0

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
        if self._waiting and not all(gathered.welcome() for gathered in self._gathered):
            self._tally.refused += 1  # what was gathered before is not to suffer
            return
        for gathered in self._gathered:
            gathered.add()
        if not all(gathered.finite() for gathered in self._gathered):
            self._drop()

    def left_out(self) -> None:
        """A minibatch whose gradients are not to be used: only the clock goes on."""
        for span, gathered in zip(self.spans, self._gathered, strict=True):
            span.mark()
            gathered.add()
            gathered.spoil()
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
            for gathered in self._gathered:
                gathered.spoil()
            return
        self._tally.refused += 1
        for gathered in self._gathered:
            gathered.forget()

    def _exchange(self) -> None:
        self._collect(wait=self._waiting >= self._schedule.hold)
        if self._ticket is None and self._waiting:
            if self._schedule.overlap:
                self._silent = self._push_gathered(answered=False)
                self._ask_late()
            else:
                self._ticket = self._push_gathered(answered=True)
                self._collect(wait=True)
        self._began = self._service.now()

    def _push_gathered(self, answered: bool) -> Ticket:
        minibatches = self._waiting
        return self._push([gathered.mean() for gathered in self._gathered], minibatches, answered)

    def _ask_late(self) -> None:
        """Ask for values so late that they are fresh."""
        self._ticket = self._question()
        self._hurry = self._service.exchange_later(self._ticket, self._pace.lead)

    def _answered(self, ticket: Ticket) -> None:
        self._pace.answered(ticket.answered_at - ticket.asked_at)

    def rested(self) -> None:
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
            self._ticket = self._push_gathered(answered=True)
            self._collect(wait=True)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "pace": self._pace.state()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._pace.load(state["pace"])

# SPDX-License-Identifier: Apache-2.0
"""What a worker pushes and pulls for one optimizer, over time.

    gradients        at the end of step c:  take the values that have come, push g_c, and ask for the next values when
                     step c + 1 is nearly over (:mod:`.pace`); theta is what was pulled last, and nothing else
    blocks           after `period` steps:  push d = theta - base, and go on;
                     when the answer s comes:  theta = s + (theta - then),  base = s
    elastic          after `period` steps:  push x = theta, and go on;
                     when the center c comes:  theta = theta - alpha (x - c)

`base` is where the displacement is measured from, `then` the parameters when they were pushed. That is an overlap of 1;
with 0 a worker asks with its push, and waits for the answer. While an answer is late, work is gathered, and only when
the schedule's `hold` is reached does the worker wait.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.asynchronous.pace import Pace
from paceline.asynchronous.service import Ask, Service, Ticket
from paceline.asynchronous.spans import Gathered, Span, host
from paceline.optimizers import reset_state
from paceline.outer.elastic import Elastic
from paceline.schedule.bounded import Bounded


class Tally:
    """What happened to pushes, until it is written down.

    Attributes:
        delays: of the pushes that were answered.
        refused: pushes that were not finite.
        wait_s: seconds that the worker waited for answers.
    """

    def __init__(self) -> None:
        self.delays: list[int] = []
        self.refused = 0
        self.wait_s = 0.0


def _nothing() -> None:
    """Nothing is left to ask."""


class Stream(ABC):
    """The exchanges of one optimizer's parameters.

    Args:
        service: the way to the owners.
        schedule: when to exchange, and how far a worker may be ahead.
        spans: the parameters.
        buffers: the model's buffers, where they go with these parameters.
        number: gives each exchange its number.
        tally: counts.
    """

    def __init__(
        self,
        service: Service,
        schedule: Bounded,
        spans: list[Span],
        buffers: list[Span],
        number: Callable[[], int],
        tally: Tally,
    ) -> None:
        self.spans, self.buffers = spans, buffers
        self._service, self._schedule, self._number, self._tally = service, schedule, number, tally
        self._ticket: Ticket | None = None
        self._silent: Ticket | None = None  # a push whose answer holds no values
        self._hurry: Callable[[], None] = _nothing  # asks at once for what is to be asked for later
        self._sent_buffers = [host(span.fragment) for span in buffers]
        self.clock = 0

    # -- exchanges --------------------------------------------------------------------------------

    def _push(self, values: Sequence[Tensor], minibatches: int, answered: bool = True) -> Ticket:
        """Send `values`, one flat tensor for each span; ask for what the owners make of them, if they are wanted."""
        asks: list[Ask] = []
        for span, flat in zip(self.spans, values, strict=True):
            asks += span.asks(flat, answered)
        for span, room in zip(self.buffers, self._sent_buffers, strict=True):
            if not span.fragment.finite():  # a batch with nan has been through a BatchNorm; it would keep it for ever
                span.write(span.pulled)
            span.mark()
            asks += span.asks(span.read(room), answered)
        self.clock += 1
        settings = {span.number: span.settings() for span in self.spans}
        ticket = Ticket(self._number(), asks, self.clock, minibatches, settings=settings)
        self._service.exchange(ticket)
        return ticket

    def _collect(self, wait: bool) -> None:
        """Take the answer of the exchange under way, where it is there or is waited for."""
        under_way = [ticket for ticket in (self._silent, self._ticket) if ticket is not None]
        if not under_way or not (wait or all(self._service.done(ticket) for ticket in under_way)):
            return
        began = time.perf_counter()
        self._hurry()
        for ticket in under_way:
            self._service.wait(ticket)
            if ticket.refused:
                self._tally.refused += 1
            elif ticket.clock:
                self._tally.delays.append(ticket.delay)
        self._tally.wait_s += time.perf_counter() - began
        self._silent, self._ticket, self._hurry = None, None, _nothing
        self._answered(under_way[-1])
        asks = {ask.piece: ask for ask in under_way[-1].asks}
        for span in (*self.spans, *self.buffers):
            span.take(asks)
        self._land()

    def _answered(self, ticket: Ticket) -> None:
        """Values have come; how long they took is of interest where they are asked for late."""
        return

    @abstractmethod
    def _land(self) -> None:
        """Give the parameters what was pulled."""

    @abstractmethod
    def flush(self) -> None:
        """Push what is left, and wait for the answer."""

    def refresh(self, looks: bool) -> None:
        """Pull without a push; with nothing under way."""
        asks = [ask for span in (*self.spans, *self.buffers) for ask in span.asks(None)]
        ticket = Ticket(self._number(), asks, looks=looks)
        self._service.exchange(ticket)
        self._service.wait(ticket)
        if looks:
            for span in (*self.spans, *self.buffers):
                span.anchor = span.incoming.clone()
            return
        for span in (*self.spans, *self.buffers):
            span.take({ask.piece: ask for ask in asks})

    def wait(self) -> None:
        """Take what is under way."""
        self._collect(wait=True)

    def settle(self) -> None:
        """Leave the global values in the user's tensors."""
        for span in (*self.spans, *self.buffers):
            span.write(span.pulled)

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, with nothing under way."""
        every = (*self.spans, *self.buffers)
        return {
            "clock": self.clock,
            "pulled": [span.pulled for span in every],
            "versions": [[one.version for one in span.ranges] for span in every],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        self.clock = int(state["clock"])
        for span, pulled, versions in zip(
            (*self.spans, *self.buffers), state["pulled"], state["versions"], strict=True
        ):
            span.pulled.copy_(pulled)
            for one, version in zip(span.ranges, versions, strict=True):
                one.version = int(version)


class GradientStream(Stream):
    """Gradients are pushed, parameters pulled; the optimizer steps at the owners.

    Args:
        optimizer: whose own step is passed over.
    """

    def __init__(self, optimizer: Optimizer, *args: Any) -> None:
        super().__init__(*args)
        self._gathered = [Gathered(span) for span in self.spans]
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
        asks = [ask for span in (*self.spans, *self.buffers) for ask in span.asks(None)]
        self._ticket = Ticket(self._number(), asks)
        self._hurry = self._service.exchange_later(self._ticket, self._pace.lead)

    def _answered(self, ticket: Ticket) -> None:
        self._pace.answered(ticket.answered_at - ticket.asked_at)

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


class BlockStream(Stream):
    """Displacements are pushed, or the parameters themselves; the optimizer steps here.

    Args:
        optimizer: begins anew where its state is inf or nan.
        elastic: how the center and the workers draw at each other, where that is the rule.
        workers: N.
    """

    def __init__(self, optimizer: Optimizer, elastic: Elastic | None, workers: int, *args: Any) -> None:
        super().__init__(*args)
        self._optimizer, self._elastic, self._workers = optimizer, elastic, workers
        self._base = [span.pulled.clone() for span in self.spans]
        self._then = [host(span.fragment) for span in self.spans]
        self._now = [host(span.fragment) for span in self.spans]
        self._sent = [host(span.fragment) for span in self.spans]
        self.since = 0

    def stepped(self) -> None:
        """The optimizer made a step."""
        self.since += 1
        block = self._schedule.period
        self._collect(wait=self.since >= block * self._schedule.hold)
        if self._ticket is None and self.since >= block:
            self._push_block()
        if not self._schedule.overlap:
            self._collect(wait=True)

    @torch.no_grad()
    def _push_block(self) -> None:
        minibatches, self.since = self.since, 0
        ill = not all(span.fragment.finite() for span in self.spans)
        if ill:
            self._restart()
        if ill and self._schedule.staleness is None:
            self._tally.refused += 1
            return
        for span, base, then, sent in zip(self.spans, self._base, self._then, self._sent, strict=True):
            span.mark()  # a displacement is measured from what was pulled last
            span.read(then)
            if self._elastic is not None:
                sent.copy_(then)
            else:
                torch.sub(then, base, out=sent)
            if ill:
                sent.fill_(torch.nan)  # which the owners refuse; others wait for this worker, and its clock goes on
        self._ticket = self._push(self._sent, minibatches)

    def _restart(self) -> None:
        """What this worker has is inf or nan: it goes on from the model that it pulled last, without moments."""
        for span, base in zip(self.spans, self._base, strict=True):
            span.write(span.pulled)
            base.copy_(span.pulled)
            reset_state(self._optimizer, span.fragment.tensors)

    @torch.no_grad()
    def _land(self) -> None:
        for span, base, then, now in zip(self.spans, self._base, self._then, self._now, strict=True):
            span.read(now)
            if self._elastic is not None:
                pull = self._elastic.elastic_pull(then, span.pulled, self._workers)
                span.write(now.sub_(pull))
                span.pulled.add_(pull)  # the center after this worker has drawn at it
                continue
            progress = now.sub_(then)
            if span.fragment.dtype == span.pulled.dtype:
                base.copy_(span.pulled)
                span.write(progress.add_(base))
                continue
            span.write(progress + span.pulled)  # 16 bits: what rounding takes away is no progress
            torch.sub(span.read(base), progress, out=base)

    def flush(self) -> None:
        self._collect(wait=True)
        if self.since:
            self._push_block()
            self._collect(wait=True)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "since": self.since, "base": self._base}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.since = int(state["since"])
        for base, saved in zip(self._base, state["base"], strict=True):
            base.copy_(saved)

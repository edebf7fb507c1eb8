# SPDX-License-Identifier: Apache-2.0
"""The pushes and pulls of a worker: one client for each optimizer.

    gradients        at the end of step c:  take the values that have come, push g_c, and ask for the next values when
                     step c + 1 is nearly over (`lead`); theta is what was pulled last, and nothing else
    blocks           after `period` steps:  push d = theta - base, and go on;
                     when the answer s comes:  theta = s + (theta - then),  base = s
    elastic          after `period` steps:  push x = theta, and go on;
                     when the center c comes:  theta = theta - alpha (x - c)

`base` is where the displacement d is measured from, `then` the parameters when they were pushed. That is an overlap of
1; with 0 a worker pulls with its push, and waits for the answer. While an answer is late, the worker gathers work; it
waits only when the schedule's `hold` is reached.

A worker that pushes gradients pulls new values so late that they are fresh, and early enough to arrive before the
minibatch ends:

    lead = 0.8 c - 1.5 a          c: what a short minibatch takes, a: what an answer takes; at least 0

Values that are pulled at the end of a minibatch lack, at the end of the next one, all that other workers pushed
meanwhile; pulled `lead` seconds later, they lack little more than the pushes during the answer's way.
c is the lower quartile of the last minibatches, because a late pull makes the worker wait; a is the median of the last
answers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.flat import Fragment, flat_view, local
from paceline.core.optimizer_state import reset_state
from paceline.data.ledger.epoch_ledger import Mark
from paceline.errors import UnsupportedError
from paceline.rules.outer import Elastic
from paceline.rules.schedule.bounded import Bounded
from paceline.rules.topology.sharded import Cut
from paceline.update.exchange.exchanger import Timing
from paceline.update.monitor import Monitor, is_sampled
from paceline.update.server.protocol import PendingExchange, ShardRequest
from paceline.update.server.shard import LEDGER_SHARD, LOCAL_SETTINGS, GroupSettings
from paceline.update.server.simulated_service import SimulatedService
from paceline.update.server.socket_service import SocketService

Service = SimulatedService | SocketService
"""Carries a worker's requests to the owners: events on a simulated clock, or sockets."""


Group = tuple[Optimizer, int]
"""An optimizer, and the number of its group."""


@dataclass
class ShardRange:
    """A shard's place in its span."""

    number: int  # the same on all workers
    cut: Cut  # its elements and its owner
    version: int = 0  # of the values that were pulled last
    computed_at: int = 0  # version at which the next push is computed


class Span:
    """Tensors of one kind end to end, with the values that were pulled last."""

    def __init__(self, number: int, fragment: Fragment, group: Group | None, cuts: list[Cut], first: int) -> None:
        self.number, self.fragment, self._group = number, fragment, group  # the same on all workers
        self.ranges = [ShardRange(first + k, cut) for k, cut in enumerate(cuts)]  # its shards
        self.pulled = host(fragment)  # the global model as this worker knows it, in host memory
        self.incoming = host(fragment)  # memory for answers
        self.exported = self.pulled  # for exports of the global model
        self.numel = fragment.numel
        self._free: list[Tensor] = []  # memory for pushes

    def read(self, out: Tensor) -> Tensor:
        """Copy the tensors to `out`, host memory, shape (numel,)."""
        self.fragment.refresh()
        return self.fragment.whole(out=out) if self.fragment.device.type == "cpu" else out.copy_(self.fragment.whole())

    def write(self, values: Tensor) -> None:
        """Write values, shape (numel,), to the tensors."""
        self.fragment.refresh()
        self.fragment.write(0, self.numel, values.to(self.fragment.device, non_blocking=True))

    @torch.no_grad()
    def changed(self) -> list[str]:
        """The tensors that do not hold the values that were pulled last."""
        part, found = self.fragment, []
        for slot, tensor in zip(part.slots, part.tensors, strict=True):
            now = flat_view(slot.name, tensor)
            if not torch.equal(now, self.pulled[slot.offset : slot.end].to(now.device, now.dtype)):
                found.append(slot.name)
        return found

    def settings(self) -> GroupSettings:
        """The optimizer group's settings at present, as JSON types."""
        if self._group is None:
            return {}
        optimizer, k = self._group  # read again: `load_state_dict` replaces the dictionaries of all groups
        group: dict[str, Any] = optimizer.param_groups[k]
        return {name: _plain(v) for name, v in group.items() if name not in LOCAL_SETTINGS and _is_plain(v)}

    def borrow(self) -> Tensor:
        """Free host memory for a push, shape (numel,), until `give_back`."""
        return self._free.pop() if self._free else host(self.fragment)

    def give_back(self, flat: Tensor) -> None:
        """Take memory back, from any thread."""
        self._free.append(flat)

    def requests(self, values: Tensor | None, answered: bool = True) -> dict[int, ShardRequest]:
        """Shard -> a request to it, which pushes `values`, shape (numel,), if given, and pulls if `answered`."""
        found = {}
        for one in self.ranges:
            low, high = one.cut.begin, one.cut.end
            pushed = None if values is None else values[low:high]
            out = self.incoming[low:high] if answered else None
            found[one.number] = ShardRequest(one.number, self.number, pushed, out, one.computed_at)
        return found

    def note_version(self) -> None:
        """Note that the next push is computed at the values pulled last, whatever answer arrives before it."""
        for one in self.ranges:
            one.computed_at = one.version

    def take(self, requests: dict[int, ShardRequest]) -> None:
        """Make the values that arrived the ones pulled last."""
        self.pulled, self.incoming = self.incoming, self.pulled
        self.exported = self.pulled
        for one in self.ranges:
            one.version = requests[one.number].version


def host(fragment: Fragment) -> Tensor:
    """Zeros for a fragment's values in host memory; pinned where the model is on CUDA."""
    return fragment.zeros(torch.device("cpu"))


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class GradientAccumulator:
    """The sum of a span's gradients since the last push."""

    def __init__(self, span: Span) -> None:
        self._fragment = span.fragment
        device = span.fragment.device
        self._device = None if device.type == "cpu" else torch.zeros(span.numel, dtype=span.pulled.dtype, device=device)
        self._span, self._flat = span, span.borrow()
        self._views: dict[int, list[Tensor]] = {}
        self.minibatches = 0

    @property
    def _filled(self) -> Tensor:
        """The sum, on the parameters' device."""
        return self._flat if self._device is None else self._device

    def _in(self, flat: Tensor) -> list[Tensor]:
        """Views of the flat tensor in the parameters' shapes and strides."""
        if flat.data_ptr() not in self._views:
            views = []
            for slot, tensor in zip(self._fragment.slots, self._fragment.tensors, strict=True):
                own = local(tensor)
                views.append(flat[slot.offset : slot.end].as_strided(own.shape, own.stride()))
            self._views[flat.data_ptr()] = views
        return self._views[flat.data_ptr()]

    @torch.no_grad()
    def add(self) -> None:
        views = self._in(self._filled)
        pairs = [(view, tensor.grad) for view, tensor in zip(views, self._fragment.tensors, strict=True)]
        self._refuse_sparse()
        have = [(view, grad) for view, grad in pairs if grad is not None]
        if self.minibatches == 0:
            for view, grad in pairs:
                if grad is None:
                    view.zero_()
            if have:
                torch._foreach_copy_([view for view, _ in have], [local(grad) for _, grad in have])
        else:
            for view, grad in have:
                view.add_(local(grad))
        self.minibatches += 1

    def _refuse_sparse(self) -> None:
        for name, tensor in zip(self._fragment.names, self._fragment.tensors, strict=True):
            if tensor.grad is not None and tensor.grad.is_sparse:
                raise UnsupportedError(
                    f"{name} has a sparse gradient, which has no flat form; use sparse=False in its embedding, or a "
                    "rule that exchanges blocks"
                )

    @torch.no_grad()
    def incoming_finite(self) -> bool:
        """Whether the present gradients are finite."""
        self._refuse_sparse()
        gradients = [local(tensor.grad) for tensor in self._fragment.tensors if tensor.grad is not None]
        if not gradients:
            return True
        sums = torch.stack([gradient.sum(dtype=self._fragment.outer_dtype) for gradient in gradients])
        return bool(torch.isfinite(sums).all()) or all(bool(torch.isfinite(g).all()) for g in gradients)

    @torch.no_grad()
    def mean(self) -> Tensor:
        """The mean gradient, shape (numel,), in host memory; the caller gives it back to the span."""
        flat = self._flat
        if self._device is not None:
            flat.copy_(self._device)
        if self.minibatches > 1:
            flat.div_(self.minibatches)
        self._flat = self._span.borrow()
        self.minibatches = 0
        return flat

    @torch.no_grad()
    def finite(self) -> bool:
        return bool(torch.isfinite(self._filled.sum())) or bool(torch.isfinite(self._filled).all())

    @torch.no_grad()
    def fill_nan(self) -> None:
        """Make the sum nan, so that all owners refuse it."""
        self._filled.fill_(torch.nan)


class ExchangeTally:
    """The results of pushes since the last line of the log."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self.delays: list[int] = []  # of the pushes that were answered
        self.refused = 0  # pushes that were not finite
        self.wait_s = 0.0  # seconds that the worker waited for answers

    def report(self, clients: Sequence[Client]) -> None:
        """Write the counts to the log, and reset them."""
        monitor, wait_s = self._monitor, self.wait_s
        for delay in self.delays:
            monitor.pushed(delay)
        if self.refused:
            monitor.refused(self.refused)
        if self.delays or self.refused:
            monitor.end(Timing(wait_s), None, block=max(client.clock for client in clients), warmup=False)
        else:
            monitor.sent()
        self.delays, self.refused, self.wait_s = [], 0, 0.0


KEPT = 16
"""Minibatches and answers whose durations time the next pull."""
SHORT, SLOW = 0.8, 1.5


class UnpushedSamples:
    """The sample ranges that each client has not pushed; the pushes of the first one count the samples."""

    def __init__(self, take: Callable[[], list[Mark]], clients: int, steps: Callable[[], int]) -> None:
        self._take = take  # gives the ranges that the loaders have handed out since the last call
        self._steps = steps  # gives the minibatches that the next push counts for, in all
        self._pending: list[list[Mark]] = [[] for _ in range(max(1, clients))]
        self.pushed = 0  # the first so many minibatches of this worker are pushed

    def push(self, client: int) -> list[Mark]:
        """The sample ranges that go with a client's push: all that it has not pushed."""
        if client == 0:
            self.pushed = self._steps()
        return self._from(client)

    def _from(self, client: int) -> list[Mark]:
        taken = self._take()
        for pending in self._pending:
            pending += taken
        marks, self._pending[client] = self._pending[client], []
        return marks

    def rest(self) -> list[Mark]:
        """The ranges that will not be pushed."""
        marks = self._from(0)
        self._pending = [[] for _ in self._pending]
        return marks

    @property
    def waiting(self) -> list[Mark]:
        """Ranges that another client has pushed and the first has not."""
        return list(self._pending[0])


@dataclass(frozen=True)
class ClientContext:
    """What a client is made of."""

    service: Service  # the connections to the owners
    number: Callable[[], int]  # gives each exchange of the worker its number
    samples: Callable[[], list[Mark]]  # gives the sample ranges that go with the next push
    tally: ExchangeTally  # counts the results of pushes
    schedule: Bounded  # when to exchange, and how far a worker may be ahead
    spans: list[Span]  # the parameters
    buffers: list[Span]  # the model's buffers, if they go with these parameters


def _give_back(borrowed: list[tuple[Span, Tensor]]) -> None:
    for span, flat in borrowed:
        span.give_back(flat)


class Client(ABC):
    """The exchanges of one optimizer's parameters."""

    def __init__(self, optimizer: Optimizer, context: ClientContext) -> None:
        self.spans, self.buffers = context.spans, context.buffers
        self._context, self._service, self._tally = context, context.service, context.tally
        self._optimizer, self._schedule = optimizer, context.schedule
        self._pending: PendingExchange | None = None
        self._unanswered: PendingExchange | None = None  # a push whose answer holds no values
        self._pull_now: Callable[[], None] | None = None  # starts a delayed pull at once
        self.clock = 0

    def follow(self, schedule: Bounded) -> None:
        """Change the period."""
        self._schedule = schedule

    @property
    def every(self) -> list[Span]:
        """The parameters, and the buffers that go with them."""
        return [*self.spans, *self.buffers]

    # -- exchanges --------------------------------------------------------------------------------

    def _push(self, values: Sequence[Tensor], minibatches: int, answered: bool = True) -> PendingExchange:
        """Push `values`, a tensor that each span lent; with `answered` pull the result."""
        requests: dict[int, ShardRequest] = {}
        for span, flat in zip(self.spans, values, strict=True):
            requests |= span.requests(flat, answered)
        borrowed = list(zip(self.spans, values, strict=True))
        for span in self.buffers:
            flat = span.borrow()
            borrowed.append((span, flat))
            span.fragment.reset_nonfinite(span.pulled)  # else a BatchNorm would stay nan after one bad batch
            span.note_version()
            requests |= span.requests(span.read(flat), answered)
        self.clock += 1
        settings = {span.number: span.settings() for span in self.spans}
        marks, release = self._context.samples(), partial(_give_back, borrowed)
        pending = PendingExchange(
            self._context.number(), requests, self.clock, minibatches, settings=settings, marks=marks, release=release
        )
        self._service.exchange(pending)
        return pending

    def _collect(self, wait: bool) -> None:
        """Take the answer of the exchange under way, if it has arrived or `wait` is set."""
        under_way = [pending for pending in (self._unanswered, self._pending) if pending is not None]
        if not under_way or not (wait or all(self._service.done(pending) for pending in under_way)):
            return
        began = time.perf_counter()
        if self._pull_now is not None:
            self._pull_now()
        for pending in under_way:
            self._service.wait(pending)
        for pending in under_way:
            if pending.refused:
                self._tally.refused += 1
            elif pending.clock:
                self._tally.delays.append(pending.delay)
        self._tally.wait_s += time.perf_counter() - began
        self._unanswered = self._pending = self._pull_now = None
        self._take(under_way[-1])
        self._apply(under_way[-1])

    @abstractmethod
    def _apply(self, pending: PendingExchange) -> None:
        """Apply the values that this exchange pulled to the parameters."""

    @abstractmethod
    def flush(self) -> None:
        """Push the rest, and wait for the answer."""

    def pull(self, peeks: bool) -> None:
        """Pull without a push, with no exchange under way."""
        pending = self._bare_pull(peeks)
        self._service.exchange(pending)
        self._service.wait(pending)
        if peeks:
            for span in self.every:
                span.exported = span.incoming.clone()
        else:
            self._take(pending)

    def _bare_pull(self, peeks: bool = False) -> PendingExchange:
        requests: dict[int, ShardRequest] = {}
        for span in self.every:
            requests |= span.requests(None)
        return PendingExchange(self._context.number(), requests, peeks=peeks)

    def _take(self, pending: PendingExchange) -> None:
        requests = pending.requests
        with self._service.taking:
            for span in self.every:
                span.take(requests)
            if LEDGER_SHARD in requests and requests[LEDGER_SHARD].news is not None:
                self._service.leases.learn(requests[LEDGER_SHARD].news)

    def wait(self) -> None:
        """Finish the exchange under way."""
        self._collect(wait=True)

    def restart_timing(self) -> None:
        """Time the next minibatch from now, after a barrier."""
        return

    def write_pulled(self) -> None:
        """Write the global values to the user's tensors."""
        for span in self.every:
            span.write(span.pulled)

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The client's part of a checkpoint, with no exchange under way."""
        return {
            "clock": self.clock,
            "pulled": [span.pulled for span in self.every],
            "versions": [[one.version for one in span.ranges] for span in self.every],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.clock = int(state["clock"])
        for span, pulled, versions in zip(self.every, state["pulled"], state["versions"], strict=True):
            span.pulled.copy_(pulled)
            for one, version in zip(span.ranges, versions, strict=True):
                one.version = int(version)

    def begin(self, clock: int) -> None:
        """Start from the global model at this clock, after a run of another number of workers."""
        self.clock = clock
        self.pull(peeks=False)
        self.write_pulled()


class GradientClient(Client):
    """Pushes gradients and pulls parameters; `optimizer` finds no gradients, so that its own step does nothing."""

    def __init__(self, optimizer: Optimizer, context: ClientContext) -> None:
        super().__init__(optimizer, context)
        self._accumulators = [GradientAccumulator(span) for span in self.spans]
        self._parameters = [p for span in self.spans for p in span.fragment.tensors]
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._minibatch_s, self._answer_s = deque[float](maxlen=KEPT), deque[float](maxlen=KEPT)
        self._began = self._service.now()

    @property
    def _waiting(self) -> int:
        return self._accumulators[0].minibatches if self._accumulators else 0

    def before_step(self, now: float) -> None:
        """Exchange the gradients of a minibatch that was computed by `now`, and hide them from the optimizer."""
        self._minibatch_s.append(now - self._began)
        if not self._waiting:  # all gradients until the next push are computed at these values
            for span in self.spans:
                span.note_version()
        self._unscale()
        self._gather()
        self._exchange()
        self._hidden = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

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
        if all(accumulator.finite() for accumulator in self._accumulators):
            return
        if self._schedule.staleness is not None:  # push nan, which the owners refuse, so that the clock advances
            for accumulator in self._accumulators:
                accumulator.fill_nan()
            return
        self._tally.refused += 1
        for accumulator in self._accumulators:
            accumulator.minibatches = 0

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
        """Pull so late that the values are fresh; at once before the first measurements."""
        lead_s = 0.0
        if self._minibatch_s and self._answer_s:
            short, slow = sorted(self._minibatch_s), sorted(self._answer_s)
            lead_s = max(0.0, SHORT * short[len(short) // 4] - SLOW * slow[len(slow) // 2])
        self._pending = self._bare_pull()
        self._pull_now = self._service.exchange_later(self._pending, lead_s)

    def restart_timing(self) -> None:
        self._began = self._service.now()

    def after_step(self) -> None:
        """Give the hidden gradients back."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def _apply(self, pending: PendingExchange) -> None:
        self._answer_s.append(pending.answered_at - pending.requested_at)
        for span in self.spans:
            span.write(span.pulled)

    def flush(self) -> None:
        self._collect(wait=True)
        if self._waiting:
            self._pending = self._push_gathered(answered=True)
            self._collect(wait=True)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "pace": [list(self._minibatch_s), list(self._answer_s)]}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._minibatch_s, self._answer_s = (deque(row, maxlen=KEPT) for row in state["pace"])


class DeltaClient(Client):
    """Pushes deltas, or the parameters themselves; the optimizer steps here."""

    def __init__(self, optimizer: Optimizer, context: ClientContext, elastic: Elastic | None, workers: int) -> None:
        super().__init__(optimizer, context)
        self._elastic, self._workers = elastic, workers  # elastic: where the rule pushes parameters
        self._base = [span.pulled.clone() for span in self.spans]
        self._then = [host(span.fragment) for span in self.spans]
        self._now = [host(span.fragment) for span in self.spans]
        self.since = 0
        self._written = False

    def take_written(self) -> list[Fragment]:
        """The parameters, if an answer has changed them since the last call."""
        written, self._written = self._written, False
        return [span.fragment for span in self.spans] if written else []

    def on_step(self) -> None:
        """Exchange what is due after a step of the optimizer."""
        self.since += 1
        block = self._schedule.period
        self._collect(wait=self.since >= block * self._schedule.hold)
        if self._pending is None and self.since >= block:
            self._push_block()
        if not self._schedule.overlap:
            self._collect(wait=True)

    @torch.no_grad()
    def _push_block(self) -> None:
        minibatches, self.since = self.since, 0
        ill = not all(span.fragment.finite() for span in self.spans)
        if ill:  # go on from the model that was pulled last, with a reset optimizer
            for span, base in zip(self.spans, self._base, strict=True):
                span.write(span.pulled)
                base.copy_(span.pulled)
                reset_state(self._optimizer, span.fragment.tensors)
            if self._schedule.staleness is None:
                self._tally.refused += 1
                return
        values = [span.borrow() for span in self.spans]
        for span, base, then, sent in zip(self.spans, self._base, self._then, values, strict=True):
            span.note_version()  # a delta is measured from what was pulled last
            span.read(then)
            if self._elastic is not None:
                sent.copy_(then)
            else:
                torch.sub(then, base, out=sent)
            if ill:
                sent.fill_(torch.nan)  # the owners refuse it, and the clock advances
        self._pending = self._push(values, minibatches)

    @torch.no_grad()
    def _apply(self, pending: PendingExchange) -> None:
        self._written = True
        for span, base, then, now in zip(self.spans, self._base, self._then, self._now, strict=True):
            span.read(now)
            if self._elastic is not None:
                pull = self._elastic.elastic_pull(then, span.pulled, self._workers)
                span.write(now.sub_(pull))
                span.pulled.add_(pull)  # the center after this worker's pull
                continue
            progress = now.sub_(then)
            if span.fragment.dtype == span.pulled.dtype:
                base.copy_(span.pulled)
                span.write(progress.add_(base))
                continue
            span.write(progress + span.pulled)  # 16 bits: rounding is no progress
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

    def begin(self, clock: int) -> None:
        super().begin(clock)
        self.since = 0
        for span, base in zip(self.spans, self._base, strict=True):
            base.copy_(span.pulled)

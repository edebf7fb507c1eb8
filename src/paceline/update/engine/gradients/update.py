# SPDX-License-Identifier: Apache-2.0
"""Gradient payloads: replace each worker's gradient by the workers' mean, during the backward pass.

Serves synchronous rules, and the synchronous warm-up of block rules. Knows no method by name.

An exchange is a header, the gradients in chunks, and a footer. Chunks are laid out in the order in which gradients
become ready (rank 0's order in the first pass, on all workers). A chunk is sent as soon as its last gradient is ready
and all earlier chunks have been sent, so all workers send in the same order. At the end of the pass each worker's
footer reports whether its gradients were finite, and whether one changed after it had been sent. If either happened on
any worker, all resend, without the gradients that are not finite. Under a GradScaler an overflow on one worker counts
for all: all gradients become infinite, so that all scalers skip the step and lower the scale, as one worker with the
whole batch would.

Buffers go with the same exchange (:mod:`paceline.update.engine.blocks.buffers`).

When backward returns, gradients are the workers' mean, so clipping or norms before the step act on the mean. If a
program makes several passes before a step, the last one exchanges; the footers tell all workers its number. An
unexpected pass is exchanged too, which is correct because gradients add up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.core.flat import local
from paceline.errors import ElsewhereError, NonFiniteError
from paceline.update.engine.blocks.buffers import buffer_states
from paceline.update.engine.blocks.chunks import OuterStateChunk
from paceline.update.engine.grad_scaler import Scaling, overflow
from paceline.update.engine.gradients.buckets import GradientBuckets
from paceline.update.engine.gradients.context import GradientContext
from paceline.update.engine.gradients.footer import Footer, check_same_step, of_buffers, with_footers
from paceline.update.engine.gradients.hooks import BackwardHooks
from paceline.update.engine.gradients.payloads import FirstMomentReader
from paceline.update.exchange.agreement import refuse_nothing, with_outliers_dropped
from paceline.update.exchange.chunk import Chunk
from paceline.update.exchange.exchanger import Exchanger, PendingHeader
from paceline.update.exchange.header import ExchangeHeader, ExchangeSummary
from paceline.update.exchange.kind import ExchangeKind
from paceline.update.exchange.outliers import gradient_norms
from paceline.update.exchange.pipeline import Running
from paceline.update.exchange.work import LocalWork

CHECK_EVERY = 64
"""Exchanges from one comparison of the replicas' bits to the next."""


class GradientUpdate:
    """The gradient exchanges of one optimizer.

    The model's buffers are exchanged along with the gradients of the last optimizer.

    Args:
        context: what the updates of a run share.
        exchanger: the connection.
        number: which optimizer of the run.

    Attributes:
        named: the optimizer's parameters that have elements.
        buckets: their gradients, laid out for the wire.
        usual: numbers of the parameters that get a gradient in the last pass before a step.
        expected_passes: backward passes before a step.
        exchanges: how many were made.
        norms: the recently accepted norms; None without an outlier policy.
        landed: whether the present gradients are the workers' mean.
        problem: why they are not, if no worker's gradients could be used.
    """

    def __init__(self, context: GradientContext, exchanger: Exchanger, number: int) -> None:
        rule, (optimizer, named) = context.run.rule, context.run.owned[number]
        self._context, self._exchanger, self._kind = context, exchanger, ExchangeKind.gradients(number)
        self._optimizer = optimizer
        self.named = [(name, p) for name, p in named if local(p).numel()]
        self.codec, self._moments_after = rule.gradient_codec, rule.payload.moments_after
        self._moments = FirstMomentReader(optimizer) if self._moments_after is not None else None
        self.scaling = Scaling(context.run.settings.scaler)
        last = number == len(context.run.owned) - 1
        self._buffers = buffer_states(context.run.model, None, lambda: exchanger.transport.world) if last else []
        self.norms = gradient_norms(context.run.settings.guard, [local(p) for _, p in self.named])
        self.buckets = GradientBuckets(
            self.named, self._buffers, self.codec, rule.common.chunks, exchanger.transport, self.norms is not None
        )
        self._waits: list[set[int]] = []  # of each chunk, the parameters whose gradients are missing
        self.usual: set[int] = set()
        self.expected_passes = 1
        self.exchanges = 0
        self._step = 0  # the step of this exchange, from 0; a step may take several exchanges
        self._pending_header: PendingHeader | None = None
        self._running: list[tuple[Chunk, Running]] = []
        self._sends = False  # whether chunks are sent in the present pass
        self._stale = False  # whether a gradient changed after it had been sent
        self.landed = False
        self._present = 0  # number of gradients at the last exchange
        self.problem: NonFiniteError | None = None
        parameters: list[Tensor] = [p for _, p in self.named]
        self._hooks = BackwardHooks(
            parameters, number, context.pass_ends, self._pass_began, self._ready, self._pass_over
        )

    # -- during backward ---------------------------------------------------------------------------

    def _pass_began(self) -> None:
        self.landed = False
        self._sends = bool(self.buckets.chunks) and self._context.sends_early and self._context.due and not self.frozen

    def _ready(self, index: int) -> None:
        if not self._sends or self._hooks.passes < self.expected_passes:
            return
        place, number = self.buckets.place[index]
        if self._pending_header is None:
            self._open(self._context.work())
        elif self.buckets.buckets[place].is_packed(number):
            self._stale = True
            return
        for k in self.buckets.chunks_of[index]:
            self._waits[k].discard(index)
        while len(self._running) < len(self.buckets.chunks) and not self._waits[len(self._running)]:
            self._launch()

    def _pass_over(self) -> None:
        if self._context.due and self._hooks.passes >= self.expected_passes and not self.frozen:
            self.exchange()

    @property
    def frozen(self) -> bool:
        """Whether Adam's first moment is exchanged, once a step, in place of the gradient."""
        return self._moments_after is not None and self._context.work().total >= self._moments_after

    def _open(self, work: LocalWork) -> None:
        self._factor, self._stale, self._running = work.factor, False, []
        self._step = work.total
        self.scaling.follow(chunk.state for chunk in self.buckets.chunks if not self.codec.exact)
        header = ExchangeHeader(0, self._kind, True, work.leaving, True, 1, 0.0, work.factor, work.total, 0)
        self._exchanger.timing.wait_s = 0.0
        self._pending_header = self._exchanger.open(header)
        self.buckets.start(self._moments if self._moments is not None and self.frozen else None)
        self._waits = [set() for _ in self.buckets.chunks]
        for index in self.usual:
            for k in self.buckets.chunks_of[index]:
                self._waits[k].add(index)

    def _launch(self) -> None:
        chunk = self.buckets.chunks[len(self._running)]
        self._running.append((chunk, self._exchanger.begin(chunk, self._factor, self._step)))

    # -- the exchange -----------------------------------------------------------------------------

    @torch.no_grad()
    def exchange(self) -> None:
        """Send the remaining chunks, and replace the gradients by the workers' mean.

        A gradient that no worker has stays absent. Raises as `BlockUpdate.land` does, but keeps a `NonFiniteError` in
        `problem`, because a gradient scaler may skip the step.
        """
        summaries: list[ExchangeSummary] = []
        with self._context.timed(self._exchanger, summaries):
            if self._pending_header is None:
                self._open(self._context.work())
            assert self._pending_header is not None
            pending_header = self._pending_header
            if not self.buckets.chunks:
                self._pending_header = None  # nothing to finish if this raises
                self._arrange(pending_header.summary())
                self._pending_header = pending_header
            while len(self._running) < len(self.buckets.chunks):
                self._launch()
            self._launch_buffers(self._factor)
            finite = self.buckets.finite
            stale = self._stale or self.buckets.changed
            norm = self.buckets.norm() if finite and self.norms is not None else 0.0
            usual = self.norms is None or self.norms.usual(self._exchanger.transport.world.rank, norm)
            presence, overflowed = self.buckets.presence(), not finite and self.scaling.active
            footer = Footer(finite, stale, presence, self._hooks.passes, self._checked(), usual, norm, overflowed)
            footer = replace(footer, rate=self._rate)
            summaries.append(self._conclude(pending_header, footer))
            self._learn()

    def join(self, pending_header: PendingHeader) -> ExchangeSummary:
        """Join an exchange with an empty contribution."""
        if not self.buckets.chunks:
            self._arrange(pending_header.summary())
        self._step = max(h.total for h in pending_header.summary().headers if h.brings)
        self._send_all(0.0)
        summary = self._conclude(pending_header, Footer())
        self.landed, self.problem = False, None  # it was no step of this worker
        return summary

    @torch.no_grad()
    def withdraw(self) -> ExchangeSummary | None:
        """Finish the exchange of a failed pass, without this worker's part; None if there is none."""
        if self._pending_header is None:
            return None
        self._factor = 0.0
        if not self.buckets.chunks:
            self._arrange(self._pending_header.summary())
        self.buckets.mute(True)
        while len(self._running) < len(self.buckets.chunks):
            self._launch()
        self._launch_buffers(0.0)
        footer = Footer(finite=False, presence=self.buckets.presence(), buffers=False, rate=self._rate)
        summary = self._conclude(self._pending_header, footer)
        self.buckets.mute(False)
        return summary

    def _send_all(self, factor: float) -> None:
        self._factor, self._running = factor, []
        self.buckets.start()
        for _ in self.buckets.chunks:
            self._launch()
        self._launch_buffers(factor)

    def _launch_buffers(self, factor: float) -> None:
        for state in self._buffers:
            state.fragment.refresh()
            state.reset_nonfinite()
        for chunk in self.buckets.buffer_chunks:
            self._running.append((chunk, self._exchanger.begin(chunk, factor, self._step)))

    def _conclude(self, pending_header: PendingHeader, footer: Footer) -> ExchangeSummary:
        """Exchange footers and apply the mean; or resend everything if a footer requires it."""
        pending, rows = self._exchanger.gather_row(footer.row)
        self._pending_header = None
        summary, results = self._collect(pending_header)
        pending.wait()
        footers = [Footer.unpack(row) for row in rows.tolist()]
        check_same_step(summary, footers, self._exchanger.transport.world)
        sent, summary = of_buffers(summary, footers), with_outliers_dropped(with_footers(summary, footers))
        if summary.weight > 0 and (summary.left_out or any(f.stale for f in footers)):
            self._send_all(summary.headers[self._exchanger.transport.world.rank].factor)
            results = [(chunk, *running.finish()) for chunk, running in self._running]
        self._running = []
        self.exchanges += 1
        brought = [f for f, h in zip(footers, summary.headers, strict=True) if h.brings]
        if not pending_header.header.brings:
            self.buckets.clear_presence()
        if len({f.presence for f in brought}) > 1:
            self.buckets.share_presence(summary)
        self.landed, self.problem = True, None
        if summary.weight > 0:
            self._land(results, summary)
        else:
            self._land_nothing(results, summary, sent, [rank for rank, f in enumerate(footers) if f.overflowed])
        self.expected_passes = max(f.passes for f in brought) or 1
        self._context.read_requests(summary)
        return self._remember(summary)

    def _remember(self, summary: ExchangeSummary) -> ExchangeSummary:
        """Add the norms to the window; the summary with the usual range of before."""
        if self.norms is None:
            return summary
        between = self.norms.between
        self.norms.add(summary.accepted, summary.changed)
        return replace(summary, between=between)

    def _collect(self, pending_header: PendingHeader) -> tuple[ExchangeSummary, list[Any]]:
        """Wait for all operations, and only then raise an error of the header."""
        try:
            summary = pending_header.summary()
        except ElsewhereError:
            self._running = []  # no worker answers it
            raise
        finally:
            results = [(chunk, *running.finish()) for chunk, running in self._running]
        return summary, results

    def _land(self, results: list[Any], summary: ExchangeSummary) -> None:
        for chunk, total, state in results:
            chunk.keep(state)
            chunk.land(total, summary)
        if self._exchanger.transport.world.rank == 0:  # only one worker, so that it counts once
            for chunk in self.buckets.chunks:
                chunk.take_back(summary.weight)
        for bucket in self.buckets.buckets:
            bucket.unpack()

    def _land_nothing(
        self, results: list[Any], summary: ExchangeSummary, sent: ExchangeSummary, overflowed: list[int]
    ) -> None:
        """No gradient can be used: average only the buffers, as they were sent."""
        if sent.weight > 0:
            for chunk, total, state in results:
                if isinstance(chunk, OuterStateChunk):
                    chunk.keep(state)
                    chunk.land(total, sent)
        if overflowed:
            self.problem = overflow(self._exchanger.transport.world, overflowed)
            for bucket in self.buckets.buckets:
                bucket.make_infinite()
            return
        try:
            refuse_nothing(summary, self._exchanger.transport.world)
        except NonFiniteError as error:
            self.problem = error

    def _learn(self) -> None:
        self.usual = set(self._hooks.order)
        self._present = sum(p.grad is not None for _, p in self.named)

    # -- order and presence -----------------------------------------------------------------------

    def _arrange(self, summary: ExchangeSummary) -> None:
        """Lay the parameters out in the order in which gradients became ready on the first worker that has some."""
        source = next(rank for rank, h in enumerate(summary.headers) if h.brings)
        seen = list(dict.fromkeys(self._hooks.order))
        rest = [index for index in reversed(range(len(self.named))) if index not in set(seen)]
        transport = self._exchanger.transport
        order = torch.tensor(seen + rest, dtype=torch.int64)
        order = order.to(transport.wire_device(order.device))
        transport.broadcast(order, source).wait()
        self.buckets.build(order.tolist())

    # -- the step ---------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Exchange gradients that backward has not exchanged, and make the rule's own step, if it has one."""
        frozen = self.frozen
        if not self.landed or sum(p.grad is not None for _, p in self.named) > self._present:
            self.exchange()
        if frozen and self._moments is not None and self.problem is None:
            pairs = [pair for one in self.buckets.buckets for pair in zip(one.fragment.tensors, one.has, strict=True)]
            assert self._moments_after is not None
            self._moments.step([t for t, has in pairs if has], self._step + 1 - self._moments_after)

    def stepped(self) -> None:
        """The optimizer made its step."""
        self.landed, self.problem, self._hooks.passes = False, None, 0
        if self._moments is not None:
            self._moments.show()

    @property
    def _rate(self) -> float:
        """Sum of the groups' learning rates; 0 where one is a tensor, which is not read."""
        rates = [group.get("lr", 0.0) for group in self._optimizer.param_groups]
        return float(sum(rates)) if all(isinstance(rate, (int, float)) for rate in rates) else 0.0

    def _checked(self) -> int:
        return self.buckets.checksum() if (self.exchanges + 1) % CHECK_EVERY == 0 else 0

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()

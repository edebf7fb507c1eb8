# SPDX-License-Identifier: Apache-2.0
"""Gradient payloads: the workers' mean gradient takes the place of each worker's own, while backward goes on.

Serves synchronous rules, and the synchronous warm-up of block rules. Knows no method by name.

An exchange is a header, the gradients in chunks, and a footer. Chunks lie in the order in which gradients become ready
(rank 0's order in the first pass, taken by all); each leaves as soon as its last gradient is there and all before it
have left, so the order on the wire is the same everywhere whatever the timing. When the pass is over the footer says
what could not be known before: whether this worker's gradients were finite, and whether one of them changed after it
had left. Where either happened anywhere, everybody sends again, without what is not finite. Under a GradScaler an
overflow anywhere is one everywhere: the gradients of all become infinite, so that all scalers skip the step and lower
the scale alike, as that of one worker with the whole batch does.

Buffers (running statistics) go along, as their mean. One that holds inf or nan goes back to the last mean first.

When backward returns, gradients are the workers' mean: what a program does with them before the step (clipping, norms)
it does to the mean, alike on all. Where a program makes several passes before a step, the exchange goes with the last,
whose number all learn from the footers; a pass that nobody expected is exchanged as well, which is right because
gradients add up.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.flat import Modules, fragments, local
from paceline.core.optimizer_state import Named
from paceline.errors import ElsewhereError, MismatchError, NonFiniteError
from paceline.rules.codec import Dense
from paceline.rules.payload import FirstMoment
from paceline.rules.rule import Rule, is_block
from paceline.update.engine.blocks.buffers import buffer_states
from paceline.update.engine.blocks.chunks import OuterStateChunk, cut, restored
from paceline.update.engine.blocks.numbers import PlainMean
from paceline.update.engine.grad_scaler import Scaling, overflow
from paceline.update.engine.gradients.bucket import FlatGradient, GradientChunk
from paceline.update.engine.gradients.footer import Footer, of_buffers, with_footers
from paceline.update.engine.gradients.hooks import Backward, PassEnd
from paceline.update.engine.gradients.payloads import FirstMoments
from paceline.update.exchange.agreement import compare, refuse_nothing, with_outliers_dropped
from paceline.update.exchange.checksum import combine
from paceline.update.exchange.exchanger import Chunk, Exchanger, PendingHeader
from paceline.update.exchange.header import ExchangeSummary, Header
from paceline.update.exchange.kind import Kind
from paceline.update.exchange.outliers import Guard, gradient_norms
from paceline.update.exchange.pipeline import Running
from paceline.update.exchange.work import Work

CHECK_EVERY = 64
"""The replicas' bits are compared at every 64th exchange."""


@dataclass(frozen=True)
class Occasion:
    """What an update asks of the run that it belongs to.

    Attributes:
        due: whether gradients are exchanged now.
        work: what this worker's gradient stands for.
        watched: a context manager round the part of an exchange that the user waits for; is given a list in which the
            summary will be.
        ends: the ends of backward passes, shared by the updates of a run.
        early: whether chunks may leave before the pass is over; with several optimizers their order would not be
            certain.
        heard: told of every exchange when nothing of it is on the wire any more.
        scaler: the GradScaler that was handed over, if any.
    """

    due: Callable[[], bool]
    work: Callable[[], Work]
    watched: Callable[[Exchanger, list[ExchangeSummary]], AbstractContextManager[None]]
    ends: PassEnd
    early: bool
    heard: Callable[[ExchangeSummary], None]
    scaler: Any = None


class GradientUpdate:
    """Gradient payloads of one optimizer: the mean gradient takes the place of the worker's own.

    Args:
        rule: the rule (its codec and route).
        exchanger: the connection.
        kind: which optimizer's gradients its headers are about.
        optimizer: it.
        named: its parameters.
        model: whose buffers are averaged along with these gradients; None where another optimizer's carry them.
        occasion: the run's side.
        guard: against gradients that are far larger than usual, or None.
    """

    def __init__(
        self,
        rule: Rule,
        exchanger: Exchanger,
        kind: Kind,
        optimizer: Optimizer,
        named: Named,
        model: Modules | None,
        occasion: Occasion,
        guard: Guard | None = None,
    ) -> None:
        self._rule, self._exchanger, self.kind, self._occasion = rule, exchanger, kind, occasion
        self._named = [(name, p) for name, p in named if local(p).numel()]
        self._codec = Dense() if is_block(rule) else rule.codec  # the warm-up of a block rule is dense
        self._moments = FirstMoments(optimizer) if isinstance(rule.payload, FirstMoment) else None
        self.scaling = Scaling(occasion.scaler)
        self.buffer_states = buffer_states(model, None) if model is not None else []
        self.parts: list[FlatGradient] = []
        self._chunks: list[GradientChunk] = []
        self._buffer_chunks: list[OuterStateChunk] = []
        self._place: list[tuple[int, int]] = []  # of each parameter: its part, and its number there
        self._chunks_of: list[list[int]] = []  # of each parameter: the chunks in which its gradient lies
        self._waits: list[set[int]] = []  # of each chunk: parameters that it still waits for
        self._usual: set[int] = set()  # parameters that get a gradient in the last pass before a step
        self._expected = 1  # passes before a step
        self._exchanges = 0
        self._number = 0  # of the step that is exchanged, the first is 0; a step may take several exchanges
        self._norms = gradient_norms(guard, [local(p) for _, p in self._named])
        self._pending_header: PendingHeader | None = None
        self._running: list[tuple[Chunk, Running]] = []
        self._stale = False
        self.landed = False
        self.present = 0  # gradients that were there when it landed
        self.problem: NonFiniteError | None = None
        parameters: list[Tensor] = [p for _, p in self._named]
        self._backward = Backward(
            parameters, kind.optimizer, occasion.ends, self._pass_began, self._ready, self._pass_over
        )

    # -- while backward goes on -------------------------------------------------------------------

    def _pass_began(self) -> None:
        self.landed = False  # whatever the gradients were, they are growing, or new

    def _ready(self, index: int) -> None:
        if not (self._occasion.early and self._chunks and self._occasion.due()) or self.frozen:
            return
        if self._backward.passes < self._expected:
            return
        part, number = self._place[index]
        if self._pending_header is None:
            self._open(self._occasion.work())
        elif self.parts[part].is_packed(number):
            self._stale = True
            return
        for k in self._chunks_of[index]:
            self._waits[k].discard(index)
        while len(self._running) < len(self._chunks) and not self._waits[len(self._running)]:
            self._launch()

    def _pass_over(self) -> None:
        if self._occasion.due() and self._backward.passes >= self._expected and not self.frozen:
            self.exchange()

    @property
    def frozen(self) -> bool:
        """Whether Adam's first moment is exchanged, once a step, in place of the gradient."""
        payload = self._rule.payload
        return isinstance(payload, FirstMoment) and self._occasion.work().total >= payload.warmup

    def _open(self, work: Work) -> None:
        self._factor, self._stale, self._running = work.factor, False, []
        self._number = work.total
        self.scaling.follow(chunk.state for chunk in self._chunks if not self._codec.exact)
        header = Header(0, self.kind, True, work.leaving, True, 1, 0.0, work.factor, work.total, 0)
        self._exchanger.timing.wait_s = 0.0
        self._pending_header = self._exchanger.open(header)
        for part in self.parts:
            part.forget()
            if self._moments is not None and self.frozen:
                part.carrier = self._moments
        self._waits = [set() for _ in self._chunks]
        for index in self._usual:
            for k in self._chunks_of[index]:
                self._waits[k].add(index)

    def _launch(self) -> None:
        chunk = self._chunks[len(self._running)]
        self._running.append((chunk, self._exchanger.begin(chunk, self._factor, self._number)))

    # -- the exchange -----------------------------------------------------------------------------

    @torch.no_grad()
    def exchange(self) -> None:
        """Replace the gradients by the workers' mean: what has not left yet leaves now.

        A gradient that no worker has stays absent. Raises as `BlockUpdate.land` does, but keeps a `NonFiniteError` in
        `problem`: a gradient scaler may mean to skip the step.
        """
        met: list[ExchangeSummary] = []
        with self._occasion.watched(self._exchanger, met):
            if self._pending_header is None:
                self._open(self._occasion.work())
            assert self._pending_header is not None
            pending_header = self._pending_header
            if not self._chunks:
                self._pending_header = None  # after an error there is nothing to go on with
                self._arrange(pending_header.summary())
                self._pending_header = pending_header
            while len(self._running) < len(self._chunks):
                self._launch()
            self._launch_buffers(self._factor)
            finite = all(part.finite for part in self.parts)
            stale = self._stale or any(part.changed() for part in self.parts)
            norm = self._norm() if finite else 0.0
            usual = self._norms is None or self._norms.usual(self._exchanger.transport.world.rank, norm)
            said = (self._presence(), self._backward.passes, self._checked(), usual, norm)
            footer = Footer(finite, stale, *said, overflowed=not finite and self.scaling.active)
            met.append(self._conclude(pending_header, footer))
            self._learn()

    def join(self, pending_header: PendingHeader) -> ExchangeSummary:
        """Come to an exchange with nothing in hand."""
        if not self._chunks:
            self._arrange(pending_header.summary())
        self._number = max(h.total for h in pending_header.summary().headers if h.brings)
        self._send_all(0.0)
        return self._conclude(pending_header, Footer())

    @torch.no_grad()
    def withdraw(self) -> None:
        """Finish an exchange of a pass that failed in the middle, without this worker's part."""
        if self._pending_header is None:
            return
        self._factor = 0.0
        if not self._chunks:
            self._arrange(self._pending_header.summary())
        for part in self.parts:
            part.muted = True
        while len(self._running) < len(self._chunks):
            self._launch()
        self._launch_buffers(0.0)
        self._conclude(self._pending_header, Footer(finite=False, presence=self._presence(), buffers=False))
        for part in self.parts:
            part.muted = False

    def _send_all(self, factor: float) -> None:
        """Every chunk, now."""
        self._factor, self._running = factor, []
        for part in self.parts:
            part.forget()
        for _ in self._chunks:
            self._launch()
        self._launch_buffers(factor)

    def _launch_buffers(self, factor: float) -> None:
        for state in self.buffer_states:
            state.fragment.refresh()
            state.mend()
        for chunk in self._buffer_chunks:
            self._running.append((chunk, self._exchanger.begin(chunk, factor, self._number)))

    def _conclude(self, pending_header: PendingHeader, footer: Footer) -> ExchangeSummary:
        """Say the footer, and apply what comes; or send all again where that is needed."""
        pending, rows = self._exchanger.gather_row(footer.pack())
        self._pending_header = None
        summary, results = self._collect(pending_header)
        pending.wait()
        footers = [Footer.unpack(row) for row in rows.tolist()]
        self._agree(summary, footers)
        sent, summary = of_buffers(summary, footers), with_outliers_dropped(with_footers(summary, footers))
        if summary.weight > 0 and (summary.left_out or any(f.stale for f in footers)):
            self._send_all(summary.headers[self._exchanger.transport.world.rank].factor)
            results = [(chunk, *running.finish()) for chunk, running in self._running]
        self._running = []
        self._exchanges += 1
        brought = [f for f, h in zip(footers, summary.headers, strict=True) if h.brings]
        if not pending_header.header.brings:
            for part in self.parts:
                part.has = [False] * len(part.has)
        if len({f.presence for f in brought}) > 1:
            self._share_presence(summary)
        self.landed, self.problem = True, None
        if summary.weight > 0:
            self._land(results, summary)
        else:
            self._land_nothing(results, summary, sent, [rank for rank, f in enumerate(footers) if f.overflowed])
        self._expected = max(f.passes for f in brought) or 1
        self._occasion.heard(summary)
        return self._remember(summary)

    def _norm(self) -> float:
        """Of this worker's gradients; 0 where it is not judged."""
        return math.sqrt(sum(part.square for part in self.parts)) if self._norms is not None else 0.0

    def _remember(self, summary: ExchangeSummary) -> ExchangeSummary:
        """Take the norms into the window; the summary with what was usual before."""
        if self._norms is None:
            return summary
        between = self._norms.between
        self._norms.add(summary.accepted, summary.changed)
        return replace(summary, between=between)

    def _collect(self, pending_header: PendingHeader) -> tuple[ExchangeSummary, list[Any]]:
        """Wait for everything; an error of the header is raised when nothing is on the wire any more."""
        try:
            summary = pending_header.summary()
        except ElsewhereError:
            self._running = []  # nobody answers it
            raise
        finally:
            results = [(chunk, *running.finish()) for chunk, running in self._running]
        return summary, results

    def _land(self, results: list[Any], summary: ExchangeSummary) -> None:
        for chunk, total, state in results:
            chunk.keep(state)
            chunk.land(total, summary)
        if self._exchanger.transport.world.rank == 0:  # one of them, so that it is owed once
            for chunk in self._chunks:
                chunk.take_back(summary.weight)
        for part in self.parts:
            part.unpack()

    def _land_nothing(
        self, results: list[Any], summary: ExchangeSummary, sent: ExchangeSummary, overflowed: list[int]
    ) -> None:
        """No gradient can be used: only the buffers are brought together, as they were sent."""
        if sent.weight > 0:
            for chunk, total, state in results:
                if isinstance(chunk, OuterStateChunk):
                    chunk.keep(state)
                    chunk.land(total, sent)
        if overflowed:
            self.problem = overflow(self._exchanger.transport.world, overflowed)
            for part in self.parts:
                part.spoil()
            return
        try:
            refuse_nothing(summary, self._exchanger.transport.world)
        except NonFiniteError as error:
            self.problem = error

    def _learn(self) -> None:
        self._usual = set(self._backward.order)
        self.present = sum(p.grad is not None for _, p in self._named)

    def _agree(self, summary: ExchangeSummary, footers: list[Footer]) -> None:
        """Refuse to go on where workers are at different steps, or hold different parameters."""
        world = self._exchanger.transport.world
        steps = {rank: h.total for rank, h in enumerate(summary.headers) if h.brings}
        if len(set(steps.values())) > 1:
            said = "; ".join(f"{world.name(rank)} in step {total + 1}" for rank, total in steps.items())
            raise MismatchError(
                world.sign(
                    f"the workers exchange the gradients of different steps: {said}. Every worker has to make as many "
                    "backward passes before a step as the others, where that number grows"
                )
            )
        sums = {rank: footers[rank].checksum for rank in steps}
        compare(sums, summary.headers[0].sequence, world)

    # -- order and presence -----------------------------------------------------------------------

    def _arrange(self, summary: ExchangeSummary) -> None:
        """Lay the parameters out in the order in which gradients became ready on the first worker that has some."""
        source = next(rank for rank, h in enumerate(summary.headers) if h.brings)
        seen = list(dict.fromkeys(self._backward.order))
        rest = [index for index in reversed(range(len(self._named))) if index not in set(seen)]
        transport = self._exchanger.transport
        order = torch.tensor(seen + rest, dtype=torch.int64)
        order = order.to(transport.wire_device(order.device))
        transport.broadcast(order, source).wait()
        self._build(order.tolist())

    def _build(self, order: list[int]) -> None:
        codec, elements = self._codec, sum(p.numel() for _, p in self._named)
        self.order = order
        index_of = {id(p): index for index, (_, p) in enumerate(self._named)}
        self._place = [(0, 0)] * len(order)
        last_of: list[tuple[int, GradientChunk]] = []
        for place, fragment in enumerate(fragments("parameters", [self._named[index] for index in order])):
            part = FlatGradient(fragment, self._exchanger.transport.wire_device(fragment.device), codec.exact)
            part.judged = self._norms is not None
            self.parts.append(part)
            for number, tensor in enumerate(fragment.tensors):
                self._place[index_of[id(tensor)]] = (place, number)
            wanted = max(1, round(self._rule.common.chunks * fragment.numel / max(elements, 1)))
            ranges = cut(part.layout, wanted, codec, self._exchanger.transport.coarse)
            for begin, end in ranges:
                chunk = GradientChunk(part, begin, end)
                final = order.index(index_of[id(fragment.tensors[chunk.last])])
                last_of.append((final, chunk))
        self._chunks = [chunk for _, chunk in sorted(last_of, key=lambda pair: pair[0])]
        for state in self.buffer_states:
            device = self._exchanger.transport.wire_device(state.device)
            wire = torch.zeros(state.numel, dtype=state.dtype, device=device)
            self._buffer_chunks.append(OuterStateChunk(state, 0, state.numel, wire, PlainMean()))
        self._chunks_of = [
            [k for k, chunk in enumerate(self._chunks) if chunk.part is self.parts[place] and chunk.holds(number)]
            for place, number in self._place
        ]

    def _presence(self) -> int:
        marks = [False] * len(self._named)
        for index, (part, number) in enumerate(self._place):
            marks[index] = self.parts[part].has[number]
        return zlib.crc32(bytes(marks))

    def _share_presence(self, summary: ExchangeSummary) -> None:
        """Workers have gradients for different parameters: whoever lacks one that another has takes it too."""
        weight = summary.headers[self._exchanger.transport.world.rank].factor
        marks = torch.tensor([[float(has), weight * has] for part in self.parts for has in part.has])
        device = self._exchanger.transport.wire_device(marks.device)
        everybody = marks.to(device)
        self._exchanger.transport.all_reduce(everybody).wait()
        rows = iter(everybody.tolist())
        for part in self.parts:
            shared = [next(rows) for _ in part.has]
            part.has = [having > 0 for having, _ in shared]
            part.missing = [max(0.0, 1 - have / summary.weight) if summary.weight else 0.0 for _, have in shared]

    # -- the step ---------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Exchange what backward has not; raises the `NonFiniteError` of an exchange that nobody could use."""
        frozen = self.frozen
        if not self.landed or sum(p.grad is not None for _, p in self._named) > self.present:
            self.exchange()
        if frozen and self._moments is not None and self.problem is None:
            present = [t for part in self.parts for t, has in zip(part.fragment.tensors, part.has, strict=True) if has]
            assert isinstance(self._rule.payload, FirstMoment)
            self._moments.step(present, self._number + 1 - self._rule.payload.warmup)

    def stepped(self) -> None:
        """The optimizer made its step."""
        self.landed, self.problem, self._backward.passes = False, None, 0
        if self._moments is not None:
            self._moments.show()

    def _checked(self) -> int:
        return self.checksum() if (self._exchanges + 1) % CHECK_EVERY == 0 else 0

    def checksum(self) -> int:
        """Of the parameters, which all workers hold alike."""
        return combine(part.checksum() for part in self.parts)

    def close(self) -> None:
        """Take the hooks away."""
        self._backward.remove()

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "order": self.order if self._chunks else [],
            "usual": sorted(self._usual),
            "expected": self._expected,
            "exchanges": self._exchanges,
            "codec": [dict(chunk.state) for chunk in self._chunks],
            "scale": self.scaling.kept_at,
            "norms": self._norms.state() if self._norms is not None else [],
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        self._usual, self._expected, self._exchanges = set(saved["usual"]), saved["expected"], saved["exchanges"]
        self.parts, self._chunks, self._buffer_chunks = [], [], []  # a run that goes back may have built them
        self._load_norms(saved)
        if saved["order"]:
            self._build([int(index) for index in saved["order"]])
        self.scaling.kept_at = saved.get("scale")
        for chunk, kept in zip(self._chunks, saved["codec"], strict=True):
            chunk.state = restored(kept, chunk.part.wire.device)

    def _load_norms(self, saved: dict[str, Any]) -> None:
        """A run that was saved without a guard has none to give."""
        if self._norms is not None:
            self._norms.load(saved.get("norms") or [])

    def regroup(self, saved: dict[str, Any]) -> None:
        """Take over what `state` gave among another number of workers: the counts, and nothing that a codec kept."""
        self._usual, self._expected, self._exchanges = set(saved["usual"]), saved["expected"], saved["exchanges"]
        self._load_norms(saved)
        if len(saved["order"]) == len(self._named) and not self._chunks:
            self._build([int(index) for index in saved["order"]])
        for chunk in self._chunks:
            chunk.state = {}

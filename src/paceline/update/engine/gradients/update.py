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

Buffers go with the same exchange (:mod:`paceline.update.engine.blocks.outer_state`).

When backward returns, gradients are the workers' mean, so clipping or norms before the step act on the mean. If a
program makes several passes before a step, the last one exchanges; the footers tell all workers its number. An
unexpected pass is exchanged too, which is correct because gradients add up.

torch calls a hook when a parameter's gradient has been accumulated, and a callback when the backward pass is over; the
user's model needs no wrapper. Passes are counted: the first whose gradients are new memory is number 1. Gradients that
other code sets (FSDP's shards, `torch.autograd.grad`) never reach a hook; they are exchanged before the step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer

from paceline.communication import virtual
from paceline.core.flat import local
from paceline.core.world import World
from paceline.errors import ElsewhereError, MismatchError, NonFiniteError
from paceline.update.engine.blocks.outer_state import OuterStateChunk, buffer_states, restored
from paceline.update.engine.context import RunContext
from paceline.update.engine.grad_scaler import ScalerHook, Scaling, refuse_hidden_scaler, stepping_scaler
from paceline.update.engine.gradients.buckets import FirstMomentReader, GradientBuckets
from paceline.update.engine.turns import Turns
from paceline.update.exchange.exchanger import (
    STEPPED,
    Chunk,
    ExchangeHeader,
    Exchanger,
    ExchangeSummary,
    PendingHeader,
    compare,
    gradients_kind,
    refuse_nothing,
    with_outliers_dropped,
)
from paceline.update.exchange.outliers import FAR_GRADIENT, Norms, farthest
from paceline.update.exchange.pipeline import Running

SKIPPED = (
    "made no step after a backward pass, and other workers did. Skip a step on all workers or on none: after "
    "backward() all hold the same gradients, so decide by them (their norm, isfinite), and not by one worker's loss"
)
"""Follows the names of such workers."""


@dataclass(frozen=True)
class Footer:
    """A worker's footer, sent after all of its gradients."""

    finite: bool = True  # whether they were free of inf and nan
    stale: bool = False  # whether one changed after it had been sent
    presence: int = 0  # checksum of which parameters have a gradient
    passes: int = 0  # backward passes since the last step
    checksum: int = 0  # of the parameters, 0 where not taken
    usual: bool = True  # whether the norm is no outlier
    norm: float = 0.0  # of the gradients, with the precision of 32 bits; 0 where not judged
    overflowed: bool = False  # whether they were not finite and every worker's GradScaler must skip the step
    buffers: bool = True  # whether the worker's buffers were sent with the weight of its header
    # sum of the learning rates of the optimizer's groups, with the precision of 32 bits; 0 if unknown
    rate: float = 0.0

    @property
    def row(self) -> Tensor:
        norm, rate = struct.unpack("<2I", struct.pack("<2f", min(self.norm, 3e38), min(self.rate, 3e38)))
        condition = self.finite | self.usual << 1 | norm << 2
        flags = self.stale | self.overflowed << 1 | self.buffers << 2 | rate << 3
        return torch.tensor([condition, int(flags), self.presence, self.passes, self.checksum])

    @classmethod
    def unpack(cls, row: list[int]) -> Footer:
        finite, usual = (bool(row[0] >> bit & 1) for bit in range(2))
        stale, overflowed, buffers = (bool(row[1] >> bit & 1) for bit in range(3))
        norm, rate = struct.unpack("<2f", struct.pack("<2I", row[0] >> 2, row[1] >> 3))
        return cls(finite, stale, row[2], row[3], row[4], usual, norm, overflowed, buffers, rate)


def with_footers(summary: ExchangeSummary, footers: Sequence[Footer]) -> ExchangeSummary:
    """The summary with the footers: a worker whose gradients were not finite has weight 0; all have, and skip the step,
    if one has overflowed under a GradScaler."""
    if any(f.overflowed for f in footers):
        return ExchangeSummary(tuple(replace(h, factor=0.0) for h in summary.headers))
    return ExchangeSummary(
        tuple(
            replace(h, finite=f.finite, factor=h.factor if f.finite else 0.0, norm=f.norm, usual=f.usual)
            for h, f in zip(summary.headers, footers, strict=True)
        )
    )


def check_same_step(summary: ExchangeSummary, footers: Sequence[Footer], world: World) -> None:
    """Raise an error if workers are at different steps or rates, or hold different parameters."""
    steps = {rank: h.total for rank, h in enumerate(summary.headers) if h.brings}
    if any(h.kind == STEPPED for h in summary.headers):  # in the same turn
        raise MismatchError(world.sign(f"{world.names(list(steps))} {SKIPPED}"))
    if len(set(steps.values())) > 1:
        said = "; ".join(f"{world.name(rank)} in step {total + 1}" for rank, total in steps.items())
        why = f"the workers exchange the gradients of different steps: {said}"
        behind = [rank for rank, total in steps.items() if total < max(steps.values())]
        if len({footers[rank].passes for rank in steps}) == 1:
            raise MismatchError(world.sign(f"{why}. {world.names(behind)} {SKIPPED}"))
        raise MismatchError(
            world.sign(
                f"{why}. Every worker has to make as many backward passes before a step as the others, where that "
                "number grows"
            )
        )
    rates = {rank: footers[rank].rate for rank in steps}
    if len(set(rates.values())) > 1:
        said = "; ".join(f"{world.name(rank)} at {rate:g}" for rank, rate in rates.items())
        raise MismatchError(
            world.sign(
                f"the workers train at different learning rates: {said}, so their models would drift apart. Let the "
                "rate follow what all workers share, such as the steps that were made, and not the batches of a "
                "worker, its loss or its clock"
            )
        )
    compare({rank: footers[rank].checksum for rank in steps}, summary.headers[0].sequence, world)


RESHARDED = ("order", "usual", "expected", "exchanges", "norms")
"""Keys of a checkpoint whose values another number of workers takes from rank 0."""
CHECK_EVERY = 64
"""Exchanges from one comparison of the replicas' bits to the next."""


class GradientUpdate:
    """The gradient exchanges of one optimizer.

    The model's buffers are exchanged along with the gradients of the last optimizer.
    """

    def __init__(self, run: RunContext, exchanges: GradientExchanges, exchanger: Exchanger, number: int) -> None:
        rule, (optimizer, named) = run.rule, run.owned[number]
        self._run, self._all, self._exchanger, self._optimizer = run, exchanges, exchanger, optimizer
        self.number, self._kind = number, gradients_kind(number)
        # the optimizer's parameters that have elements
        self.named = [(name, p) for name, p in named if local(p).numel()]
        self.codec, self._moments_after = rule.gradient_codec, rule.payload.moments_after
        self._moments = FirstMomentReader(optimizer) if self._moments_after is not None else None
        self.scaling = Scaling(run.settings.scaler)
        last = number == len(run.owned) - 1
        self._buffers = buffer_states(run.model, None, lambda: exchanger.transport.world) if last else []
        self.norms: Norms | None = None  # the recently accepted norms; None without an outlier policy
        if (guard := run.settings.guard) is not None and guard.gradients:
            parameters = [local(p) for _, p in self.named]
            self.norms = Norms(guard, lambda: farthest(parameters, FAR_GRADIENT))
        # their gradients, laid out for the wire
        self.buckets = GradientBuckets(
            self.named, self._buffers, self.codec, rule.common.chunks, exchanger.transport, self.norms is not None
        )
        self._waits: list[set[int]] = []  # of each chunk, the parameters whose gradients are missing
        self.usual: set[int] = set()  # numbers of the parameters that get a gradient in the last pass before a step
        self.expected_passes = 1  # backward passes before a step
        self.exchanges = 0
        self._step = 0  # the step of this exchange, from 0; a step may take several exchanges
        self._pending_header: PendingHeader | None = None
        self._running: list[tuple[Chunk, Running]] = []
        self._sends = False  # whether chunks are sent in the present pass
        self._stale = False  # whether a gradient changed after it had been sent
        self.landed = False  # whether the present gradients are the workers' mean
        self._present = 0  # number of gradients at the last exchange
        self.problem: NonFiniteError | None = None  # why they are not, if no worker's gradients could be used
        self._pass: int | None = None
        self._passes = 0  # backward passes since the last step
        self._seen: list[int] = []  # numbers of the parameters, in the order of the present or last pass
        self._worker = virtual.current()
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, (_, parameter) in enumerate(self.named)
            if parameter.is_leaf
        ]

    # -- during backward ---------------------------------------------------------------------------

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            if self._worker is not virtual.current():
                return  # a thread of the device, which the virtual scheduler does not control
            task = torch._C._current_graph_task_id()
            if task != self._pass:  # the first gradient of a pass
                gradient = parameter.grad
                fresh = gradient is not None and gradient._version == 0
                self._pass, self._seen = task, []
                self._passes = 1 if fresh else self._passes + 1
                self._all.expect_end(self)
                self.landed = False
                self._sends = bool(self.buckets.chunks) and self._all.sends_early and self._all.due and not self.frozen
            self._seen.append(index)
            self._ready(index)

        return ready

    def _ready(self, index: int) -> None:
        if not self._sends or self._passes < self.expected_passes:
            return
        place, number = self.buckets.place[index]
        if self._pending_header is None:
            self._open()
        elif number < self.buckets.buckets[place].packed:
            self._stale = True
            return
        for k in self.buckets.chunks_of[index]:
            self._waits[k].discard(index)
        while len(self._running) < len(self.buckets.chunks) and not self._waits[len(self._running)]:
            self._launch()

    def pass_over(self) -> None:
        """A backward pass is over that accumulated one of the gradients."""
        if self._all.due and self._passes >= self.expected_passes and not self.frozen:
            self.exchange()

    @property
    def frozen(self) -> bool:
        """Whether Adam's first moment is exchanged, once a step, in place of the gradient."""
        return self._moments_after is not None and self._run.progress.steps >= self._moments_after

    def _open(self) -> None:
        """Send the header of one minibatch, with the weight of its samples."""
        self._factor, self._step = self._run.loaders.factor, self._run.progress.steps
        self._stale, self._running = False, []
        self.scaling.follow(chunk.state for chunk in self.buckets.chunks if not self.codec.exact)
        header = ExchangeHeader(0, self._kind, True, minibatches=1, factor=self._factor, total=self._step)
        self._pending_header = self._exchanger.open(header)
        self.buckets.start(self._moments if self._moments is not None and self.frozen else None)
        self._waits = [set() for _ in self.buckets.chunks]
        for index in self.usual:
            for k in self.buckets.chunks_of[index]:
                self._waits[k].add(index)

    def _launch(self) -> None:
        chunk = self.buckets.chunks[len(self._running)]
        self._running.append((chunk, self._exchanger.begin(chunk, chunk.fill(self._factor), self._step)))

    # -- the exchange -----------------------------------------------------------------------------

    @torch.no_grad()
    def exchange(self) -> None:
        """Send the remaining chunks, and replace the gradients by the workers' mean.

        A gradient that no worker has stays absent. Raises as `BlockUpdate.land` does, but keeps a `NonFiniteError` in
        `problem`, because a gradient scaler may skip the step.
        """
        monitor = self._run.monitor
        self._wait_for_device()
        monitor.begin()
        if self._pending_header is None:
            self._all.wait()  # where the program has asked for no batch since its last step
            self._open()
        assert self._pending_header is not None
        pending_header, self._pending_header = self._pending_header, None  # nothing to finish if this raises
        self._arrange(pending_header)
        self._pending_header = pending_header
        self._send_rest()
        finite, norm = self.buckets.measured()
        stale = self._stale or any(bucket.changed() for bucket in self.buckets.buckets)
        norm = norm if finite and self.norms is not None else 0.0
        usual = self.norms is None or self.norms.usual(self._exchanger.transport.world.rank, norm)
        presence, overflowed = self.buckets.presence(), not finite and self.scaling.active
        checksum = self.buckets.checksum() if (self.exchanges + 1) % CHECK_EVERY == 0 else 0
        footer = Footer(finite, stale, presence, self._passes, checksum, usual, norm, overflowed, rate=self._rate)
        summary = self._conclude(pending_header, footer)
        self.usual = set(self._seen)
        self._present = sum(p.grad is not None for _, p in self.named)
        self._wait_for_device()
        warmup = self._run.rule.schedule.exchanges_blocks
        monitor.end(self._exchanger.timing, summary, block=0, warmup=warmup)

    def _wait_for_device(self) -> None:
        """In steps that are timed, wait for queued kernels: else their time would be counted as the exchange's."""
        if self._run.tuner.measured.probing:
            for device in {p.device for _, named in self._run.owned for _, p in named if p.device.type == "cuda"}:
                torch.cuda.synchronize(device)

    def join(self, pending_header: PendingHeader) -> ExchangeSummary:
        """Join an exchange with an empty contribution."""
        self._arrange(pending_header)
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
        self._arrange(self._pending_header)
        self.buckets.mute(True)
        self._send_rest()
        footer = Footer(finite=False, presence=self.buckets.presence(), buffers=False, rate=self._rate)
        summary = self._conclude(self._pending_header, footer)
        self.buckets.mute(False)
        return summary

    def _send_all(self, factor: float) -> None:
        self._factor, self._running = factor, []
        self.buckets.start()
        self._send_rest()

    def _send_rest(self) -> None:
        while len(self._running) < len(self.buckets.chunks):
            self._launch()
        for state in self._buffers:
            state.fragment.refresh()
            state.reset_nonfinite()
        for chunk in self.buckets.buffer_chunks:
            self._running.append((chunk, self._exchanger.begin(chunk, chunk.fill(self._factor), self._step)))

    def _conclude(self, pending_header: PendingHeader, footer: Footer) -> ExchangeSummary:
        """Exchange footers and apply the mean; or resend everything if a footer requires it."""
        pending, rows = self._exchanger.gather_row(footer.row)
        self._pending_header = None
        try:
            summary = pending_header.summary()
        except ElsewhereError:
            self._running = []  # no worker answers it
            raise
        finally:  # an error of the header comes when nothing is on the wire any more
            results = [(chunk, *running.finish()) for chunk, running in self._running]
        pending.wait()
        footers = [Footer.unpack(row) for row in rows.tolist()]
        check_same_step(summary, footers, self._exchanger.transport.world)
        pairs = zip(summary.headers, footers, strict=True)  # buffers count also where gradients are rejected
        sent = ExchangeSummary(tuple(replace(h, factor=h.factor if f.buffers else 0.0) for h, f in pairs))
        summary = with_outliers_dropped(with_footers(summary, footers))
        if summary.weight > 0 and (summary.left_out or any(f.stale for f in footers)):
            self._send_all(summary.headers[self._exchanger.transport.world.rank].factor)
            results = [(chunk, *running.finish()) for chunk, running in self._running]
        self._running = []
        self.exchanges += 1
        brought = [f for f, h in zip(footers, summary.headers, strict=True) if h.brings]
        for bucket in self.buckets.buckets if not pending_header.header.brings else ():
            bucket.has = [False] * len(bucket.has)
        if len({f.presence for f in brought}) > 1:
            self.buckets.share_presence(summary)
        self.landed, self.problem = True, None
        self._land(results, summary, sent, [rank for rank, f in enumerate(footers) if f.overflowed])
        self.expected_passes = max(f.passes for f in brought) or 1
        self._all.read_requests(summary)
        if self.norms is None:
            return summary
        return replace(summary, between=self.norms.add(summary.accepted, summary.changed))

    def _land(self, results: list[Any], summary: ExchangeSummary, sent: ExchangeSummary, overflowed: list[int]) -> None:
        """Take the mean; where no gradient can be used only that of the buffers, as they were `sent`."""
        transport, usable = self._exchanger.transport, summary.weight > 0
        for chunk, total, state in results:
            if usable or (sent.weight > 0 and isinstance(chunk, OuterStateChunk)):
                chunk.keep(state)
                chunk.land(total, summary if usable else sent)
        if usable:
            if transport.world.rank == 0:  # only one worker, so that it counts once
                for chunk in self.buckets.chunks:
                    chunk.take_back(summary.weight)
            for bucket in self.buckets.buckets:
                bucket.unpack()
        elif overflowed:
            why = f"the scaled gradients of {transport.world.names(overflowed)} hold inf or nan, so this step is to be"
            remedy = "not made by the GradScaler; call scaler.step(optimizer), or train without a scaler"
            self.problem = NonFiniteError(transport.world.sign(f"{why} skipped, and it was {remedy}"))
            for bucket in self.buckets.buckets:
                bucket.make_infinite()
        else:
            try:
                refuse_nothing(summary, transport.world)
            except NonFiniteError as error:
                self.problem = error

    # -- order and presence -----------------------------------------------------------------------

    def _arrange(self, pending_header: PendingHeader) -> None:
        """Lay the parameters out, once, in the order in which gradients became ready on the first worker that has
        some."""
        if self.buckets.chunks:
            return
        source = pending_header.summary().brought[0]
        seen = list(dict.fromkeys(self._seen))
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
        self.landed, self.problem, self._passes = False, None, 0
        if self._moments is not None:
            self._moments.show()

    @property
    def _rate(self) -> float:
        """Sum of the groups' learning rates; 0 where one is a tensor, which is not read."""
        rates = [group.get("lr", 0.0) for group in self._optimizer.param_groups]
        return float(sum(rates)) if all(isinstance(rate, (int, float)) for rate in rates) else 0.0

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- checkpoints: the keys are their format -----------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "order": self.buckets.order,
            "usual": sorted(self.usual),
            "expected": self.expected_passes,
            "exchanges": self.exchanges,
            "codec": [dict(chunk.state) for chunk in self.buckets.chunks],
            "scale": self.scaling.kept_at,
            "norms": self.norms.state() if self.norms is not None else [],
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        self._load_counts(saved)
        self.buckets.clear()  # after a restore they may exist already
        if saved["order"]:
            self.buckets.build([int(index) for index in saved["order"]])
        self.scaling.keep_at(saved.get("scale"))
        for chunk, kept in zip(self.buckets.chunks, saved["codec"], strict=True):
            chunk.state = restored(kept, chunk.bucket.wire.device)

    def reshard(self, saved: Mapping[str, Any]) -> None:
        """Load the result of `state` on another number of workers: the counts, without the codecs' state."""
        self._load_counts(saved)
        if len(saved["order"]) == len(self.named) and not self.buckets.chunks:
            self.buckets.build([int(index) for index in saved["order"]])
        for chunk in self.buckets.chunks:
            chunk.state = {}

    def _load_counts(self, saved: Mapping[str, Any]) -> None:
        self.usual, self.expected_passes, self.exchanges = set(saved["usual"]), saved["expected"], saved["exchanges"]
        if self.norms is not None:  # absent if the run was saved without a guard
            self.norms.load(saved.get("norms") or [])


class GradientExchanges:
    """One update for each optimizer while gradients are exchanged: at every step `within_host`, and never while
    `local`."""

    def __init__(self, run: RunContext, within_host: bool) -> None:
        self._run, self._within_host = run, within_host
        self.local = self.closed = False
        self._task: int | None = None
        self._touched: dict[int, GradientUpdate] = {}  # those whose gradients the present pass has accumulated
        self.updates: list[GradientUpdate] = []
        self.running = False
        self._scaler_hook: ScalerHook | None = None
        self.turns: Turns | None = None

    def take_turns(self, turns: Turns | None) -> None:
        """Workers take turns from now on, or no longer."""
        self.turns = turns

    def wait(self) -> None:
        """Wait for this worker's turn."""
        if self.turns is not None and not self.closed:
            self.turns.wait()

    def start(self, exchanger: Exchanger) -> None:
        self.running = True
        self.updates = [GradientUpdate(self._run, self, exchanger, number) for number in range(len(self._run.owned))]
        scaler = self._run.settings.scaler
        if scaler is not None:
            self._scaler_hook = ScalerHook(
                scaler, lambda optimizer: self._settle(optimizer, scaler), self._is_due, self.after_step
            )

    def expect_end(self, update: GradientUpdate) -> None:
        """Inside a backward pass: tell this update of its end, in the order of the optimizers."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # an id, not a flag: a failed pass never calls back
            self._task, self._touched = task, {}
            Variable._execution_engine.queue_callback(self._pass_over)
        self._touched[update.number] = update

    def _pass_over(self) -> None:
        touched, self._touched, self._task = self._touched, {}, None
        for _, update in sorted(touched.items()):
            update.pass_over()

    def keep_local(self, now: bool) -> None:
        self.local = now

    def close(self) -> None:
        self.closed = True
        self.stop()

    def stop(self) -> None:
        self.running = False
        for update in self.updates:
            update.close()
        if self._scaler_hook is not None:
            self._scaler_hook.remove()
            self._scaler_hook = None

    def _is_due(self, optimizer: Optimizer) -> bool:
        return any(optimizer is one for one, _ in self._run.owned) and self.each_step

    def _update_of(self, optimizer: Optimizer) -> GradientUpdate:
        return self.updates[next(k for k, (one, _) in enumerate(self._run.owned) if one is optimizer)]

    def before_step(self, optimizer: Optimizer) -> None:
        """Make sure that the gradients are the workers' mean."""
        if not self.each_step or (self._scaler_hook is not None and id(optimizer) in self._scaler_hook.done):
            return
        scaler = stepping_scaler()
        if scaler is not None:
            refuse_hidden_scaler(self._run.rule, scaler, self._update_of(optimizer).landed)
        self._settle(optimizer, scaler)

    def _settle(self, optimizer: Optimizer, scaler: Any) -> None:
        """Exchange the gradients, for a step made by `scaler`, or by the program itself (None)."""
        self._run.progress.check_unchanged(optimizer)
        update = self._update_of(optimizer)
        update.scaling.stepped_by(scaler)
        update.before_step()
        if update.problem is not None and scaler is None:  # a scaler finds it on every worker, and all skip
            if self.turns is None or not self.turns.few:
                raise update.problem
            for _, parameter in update.named:
                parameter.grad = None  # a turn without a step: with all workers it would have been left out

    def after_step(self, optimizer: Optimizer) -> None:
        self._update_of(optimizer).stepped()

    def withdraw(self) -> list[ExchangeSummary]:
        """Finish the exchanges of failed passes, without this worker's part; their summaries."""
        found = [update.withdraw() for update in self.updates]
        return [summary for summary in found if summary is not None]

    def join(self, pending_header: PendingHeader) -> ExchangeSummary:
        """Join the other workers' gradient exchange, with an empty contribution."""
        summary = pending_header.summary()
        return summary if summary.empty else self.updates[summary.kind - gradients_kind(0)].join(pending_header)

    @property
    def sends_early(self) -> bool:
        """Whether chunks are sent before the pass is over; not with several optimizers, whose order could differ
        between workers, nor in a probe, which times exchanges by themselves."""
        mine = self.turns is None or self.turns.mine
        return mine and len(self._run.owned) == 1 and not self._run.tuner.measured.probing

    @property
    def each_step(self) -> bool:
        """Whether gradients are exchanged before the next step."""
        return (self._run.progress.lockstep or self._within_host) and not self.closed

    @property
    def due(self) -> bool:
        return self.each_step and not self.local

    def read_requests(self, summary: ExchangeSummary) -> None:
        """After an exchange: gather the tuning requests, if a worker announced one; they take effect after the step."""
        if summary.asked:
            self._run.tuner.exchange_requests(self._run.transport)

# SPDX-License-Identifier: Apache-2.0
"""Carries out a rule among several workers: gradients in their time, blocks in theirs, and the end together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from paceline.checkpoint import Moment
from paceline.checkpoint.reshard import Old
from paceline.communication import Transport
from paceline.core.flat import Fragment
from paceline.data.ledger.assignment import Leases
from paceline.rules.codec import Dense
from paceline.rules.rule import Rule, is_block
from paceline.rules.topology import Flat
from paceline.update.engine import agreement, global_model
from paceline.update.engine import exit as ending
from paceline.update.engine.blocks import saved
from paceline.update.engine.blocks.schedule import Blocks
from paceline.update.engine.collective_calls import MergePoint
from paceline.update.engine.common_start import begin_together
from paceline.update.engine.context import RunContext
from paceline.update.engine.grad_scaler import ScalerHook, refuse_hidden_scaler, stepping_scaler
from paceline.update.engine.gradients.hooks import PassEnd
from paceline.update.engine.gradients.update import GradientUpdate, Occasion
from paceline.update.exchange.exchanger import Exchanger
from paceline.update.exchange.header import ExchangeSummary, Header
from paceline.update.exchange.kind import NO_PAYLOAD, WARMUP_END, Kind
from paceline.update.exchange.work import Work


class Engine:
    """What a run of several workers does at its steps.

    Where the processes of a host are one worker (`within="host"`), gradients are exchanged inside each host, at every
    step, and blocks among all processes: those of a host bring the same delta, each weighs as the others do, and over
    the slow links each carries its share of what the host sends (:mod:`paceline.rules.topology.hierarchical`).

    Args:
        context: what the parts of the run share.
    """

    def __init__(self, context: RunContext) -> None:
        self.rule, self._transport, self._model = context.rule, context.transport, context.model
        self._owned, self._settings, self._tuner = context.owned, context.settings, context.tuner
        self._flow, self._watch, self._loaders = context.progress, context.monitor, context.loaders
        self.closed = self.local = False
        self.blocks: Blocks | None = None
        self.gradients: list[GradientUpdate] = []
        self._scaler_hook: ScalerHook | None = None
        self._join()

    # -- setting up -------------------------------------------------------------------------------

    def _join(self) -> None:
        settings = {"seed": self._settings.seed, "outer_state": self._settings.outer_state}
        settings["guard"] = str(self._settings.guard)
        self._parts = begin_together(self._transport, self.rule, self._model, self._owned, settings)
        behind = self.rule.schedule.overlap > 0
        self._exchanger = Exchanger(self._transport, self.rule.codec, self.rule.common, behind)
        self._inner = self._within_host() if self.rule.within else None
        if is_block(self.rule) and self._workers() > 1:
            workers = self._workers()
            blocks = Blocks(self.rule, self._exchanger, self._model, self._owned, self._settings, workers)
            agreement.broadcast_start(self._transport, [state.fragment for state in blocks.moment_states])
            blocks.capture_moments()
            self.blocks = blocks
            self._merge_point = MergePoint(self._transport.world, len(blocks.updates))
        if self._flow.lockstep:
            self._exchange_gradients(self._exchanger)
        elif self._inner is not None:
            self._exchange_gradients(self._inner)
        for exchanger in (self._exchanger, self._inner):
            if exchanger is not None and exchanger.transport.world.size == self._transport.world.size:
                exchanger.asks = lambda: self._tuner.asks

    def _within_host(self) -> Exchanger | None:
        """The connection among the processes of this host, where any host has several."""
        hosts = self._transport.world.hosts
        names = list(dict.fromkeys(hosts))
        if len(names) == len(hosts):
            return None
        part = self._transport.part([[rank for rank, host in enumerate(hosts) if host == name] for name in names])
        return Exchanger(part, Dense(), Flat(self.rule.common.chunks))

    def _workers(self) -> int:
        """N, as the rule counts them: hosts or processes."""
        world = self._transport.world
        return len(set(world.hosts)) if self.rule.within else world.size

    def _exchange_gradients(self, exchanger: Exchanger) -> None:
        last = len(self._owned) - 1
        occasion = Occasion(
            lambda: self.gradients_due and not self.local,
            self._work,
            self._watched,
            PassEnd(),
            early=last == 0,
            heard=self._hear,
            scaler=self._settings.scaler,
        )
        self.gradients = [
            GradientUpdate(
                self.rule,
                exchanger,
                Kind.gradients(number),
                optimizer,
                named,
                self._model if number == last else None,
                occasion,
                self._settings.guard,
            )
            for number, (optimizer, named) in enumerate(self._owned)
        ]
        if self._settings.scaler is not None:
            scaler = self._settings.scaler
            settle = lambda one: self._settle(one, scaler)  # noqa: E731
            self._scaler_hook = ScalerHook(scaler, settle, self._is_due, self.after_step)

    def _stop_gradients(self) -> None:
        for update in self.gradients:
            update.close()
        if self._scaler_hook is not None:
            self._scaler_hook.remove()
            self._scaler_hook = None

    # -- gradients --------------------------------------------------------------------------------

    @property
    def hooks_gradients(self) -> bool:
        """Whether something is due before an optimizer's step."""
        return bool(self.gradients)

    @property
    def exchanged(self) -> int:
        """Blocks that have been exchanged."""
        return self.blocks.block if self.blocks is not None else 0

    @property
    def steps_committed(self) -> int:
        """Minibatches of this worker whose work is in the global model: the first so many."""
        return self._flow.steps if self._flow.lockstep or self.blocks is None else self.blocks.steps_committed

    @property
    def moment(self) -> Moment:
        """Where the exchanges stand."""
        if self.blocks is None or self._flow.lockstep:
            one = self._exchanger if self._flow.lockstep or self._inner is None else self._inner
            return Moment(self._flow.exchanges, one.sequence, one.left)
        one = self._exchanger
        return Moment(
            self.rule.schedule.warmup + self.blocks.schedule.begun, one.sequence, one.left, self.blocks.coming
        )

    @property
    def leases(self) -> Leases | None:
        """None: everybody knows everybody's part of the data."""
        return None

    @property
    def gradients_due(self) -> bool:
        """Whether gradients are exchanged before the next step."""
        return (self._flow.lockstep or self._inner is not None) and not self.closed

    def _is_due(self, optimizer: Optimizer) -> bool:
        return any(optimizer is one for one, _ in self._owned) and self.gradients_due

    def _work(self) -> Work:
        return Work(1, self._flow.steps, self._loaders.factor)

    @contextlib.contextmanager
    def _watched(self, exchanger: Exchanger, met: list[ExchangeSummary]) -> Iterator[None]:
        """Time an exchange of gradients, and write it down."""
        self._watch.begin()
        now, timing = exchanger.transport.now, exchanger.timing
        began = now()
        yield
        timing.exchange_s = now() - began - timing.wait_s
        self._watch.end(timing, met[0], block=0, warmup=is_block(self.rule))

    def _number(self, optimizer: Optimizer) -> int:
        return next(k for k, (one, _) in enumerate(self._owned) if one is optimizer)

    @property
    def keeps_steps(self) -> bool:
        """All write the steps that are due together."""
        return True

    def before_step(self, optimizer: Optimizer) -> None:
        """Make sure that the gradients are the workers' mean."""
        if not self.gradients_due or (self._scaler_hook is not None and id(optimizer) in self._scaler_hook.done):
            return
        scaler = stepping_scaler()
        if scaler is not None:
            refuse_hidden_scaler(self.rule, scaler, self.gradients[self._number(optimizer)].landed)
        self._settle(optimizer, scaler)

    def _settle(self, optimizer: Optimizer, scaler: Any) -> None:
        """Make sure of the gradients, for a step that is made by `scaler`, or by the program itself (None)."""
        agreement.check_unchanged(self._owned)
        update = self.gradients[self._number(optimizer)]
        update.scaling.stepped_by(scaler)
        update.before_step()
        if update.problem is not None and scaler is None:  # else the scaler finds it on every worker, and all skip
            raise update.problem

    def after_step(self, optimizer: Optimizer) -> None:
        """The optimizer made a step, or skipped it."""
        if self.gradients:
            self.gradients[self._number(optimizer)].stepped()

    # -- blocks -----------------------------------------------------------------------------------

    def on_step(self, warm: bool) -> None:
        """A minibatch was counted; `warm` where the warm-up is over with it."""
        if warm:  # everybody, those too who have left, takes the same start
            self._take_start(self._exchanger.meet(self._bare_header(WARMUP_END, leaving=False)))
        elif self.blocks is not None and not self._flow.lockstep:
            self._advance(self.blocks, idle=False)
        self._retune(0)

    def _advance(self, blocks: Blocks, idle: bool) -> None:
        """A step of a block was made: apply what has had its time, send what is due."""
        blocks.schedule.stepped()
        for fragment in blocks.landing():
            self._land(fragment)
        self._hear_blocks(blocks, rests=False)
        if blocks.due():
            self._end_block(leaving=False, idle=idle)
            self._hear_blocks(blocks, rests=False)

    def _end_block(self, leaving: bool, idle: bool = False, waits: bool = False) -> ExchangeSummary | None:
        """End a fragment's block; the summary where its result is waited for: without overlap, or as it is told."""
        assert self.blocks is not None
        if not leaving:  # a run that was told to close must be able to: with what it owned at attach
            agreement.check_unchanged(self._owned)
        fragment = self.blocks.next
        self._watch.begin()
        self.blocks.begin(self._flow.steps, leaving, idle, waits)
        if fragment in self.blocks.schedule.made:
            self._watch.sent()
            return None
        return self._land(fragment, begun=True)

    def _land(self, fragment: int, begun: bool = False) -> ExchangeSummary:
        assert self.blocks is not None
        if not begun:
            self._watch.begin()
        summary = self.blocks.land(fragment)
        self._merge_point.look(summary)
        self._watch.end(self._exchanger.timing, summary, block=self.blocks.block, warmup=False)
        return summary

    def _land_all(self) -> None:
        """Wait for every block that is under way, and apply it."""
        if self.blocks is not None:
            for fragment in sorted(self.blocks.schedule.made):
                self._land(fragment)

    def _take_start(self, summary: ExchangeSummary) -> None:
        """The warm-up is over."""
        self._flow.warm = True
        if self.blocks is not None:
            self.blocks.prepare()
            self._even_out(self._transport, summary, [state.fragment for state in self.blocks.outer_states])
            self.blocks.capture()
            self.blocks.entered = [self._flow.steps] * len(self.blocks.updates)
        self._stop_gradients()
        if self._inner is not None:
            self._exchange_gradients(self._inner)
        self._hear(summary)
        self._retune(0)

    # -- what is asked for while the run goes on --------------------------------------------------

    def _hear(self, summary: ExchangeSummary) -> None:
        """An exchange of all is over, and nothing of it is on the wire: hear what somebody has asked for.

        Of gradients that is in the middle of a step, at whose end it takes effect.
        """
        if summary.asked:
            self._tuner.hear(self._transport)

    def _hear_blocks(self, blocks: Blocks, rests: bool) -> None:
        """Hear what came with exchanges of blocks, where the time for it has come, and begin with it."""
        while (now := blocks.requests_due(rests)) is not None:
            self._tuner.hear(self._transport)
            self._retune(now)

    def _retune(self, now: int) -> None:
        """Apply what all have heard; `now` counts the steps since the first block began."""
        if not self._tuner.decided:
            return
        self._tuner.apply()
        self.follow(self._tuner.rule, now)

    def retune(self) -> None:
        """Apply what all have heard, between two exchanges, where all stand after the same step."""
        self._retune(self.blocks.schedule.steps if self.blocks is not None else 0)

    def follow(self, rule: Rule, now: int = 0) -> None:
        """Go on with other numbers of the rule."""
        if rule is not self.rule and self.blocks is not None:
            self.blocks.retune(rule, now)
        self.rule = rule

    @property
    def quiet(self) -> bool:
        """Whether the next step leaves the parameters alone, and does not look at them."""
        return self.blocks is not None and not self.gradients_due and self.blocks.quiet

    @property
    def global_model(self) -> Blocks | None:
        """The blocks, where the user's model differs from the global one."""
        return None if self._flow.lockstep or self.closed else self.blocks

    # -- together ---------------------------------------------------------------------------------

    def merge(self) -> None:
        """End the block that is under way, of every fragment, however many minibatches it has."""
        blocks = self.global_model
        if blocks is None:
            return
        self._land_all()
        self._merge_point.together = 0
        while self._merge_point.together < len(blocks.updates):
            self._end_block(leaving=False, waits=True)
            while blocks.schedule.asked:
                blocks.schedule.asked.pop()
                self._tuner.hear(self._transport)
        blocks.align(blocks.schedule.begun)
        self._retune(blocks.schedule.steps)

    # -- the end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Come to the end together: wait for those who have more data, and merge what is left of the last block."""
        for update in self.gradients:
            update.withdraw()
        self._land_all()
        if self._flow.lockstep:
            self._leave_lockstep()
        if not self._flow.lockstep and self._inner is not None:
            self._leave_host(self._inner)
        if self.global_model is not None:
            self._leave_blocks(self.global_model)
        checksum = self.blocks.checksum() if self.global_model and self.blocks else self.gradients[-1].checksum()
        header = replace(self._bare_header(NO_PAYLOAD, leaving=True), checksum=checksum)
        self._exchanger.meet(header)  # nobody follows it up: whether all end with the same bits

    def _leave_lockstep(self) -> None:
        """Join the gradients of those who have more data, until all have left or the warm-up is over."""
        while self._flow.lockstep:
            summary = self._join_gradients(self._exchanger)
            if any(h.kind == WARMUP_END for h in summary.headers):
                self._take_start(summary)
            elif summary.all_leaving:
                self._even_out(self._transport, summary, self._parts)
                return
            self._retune(0)

    def _leave_host(self, inner: Exchanger) -> None:
        """Join the steps of this host, and its blocks, until all its processes have left; then be as they are."""
        last = Kind.gradients(len(self._owned) - 1)
        while True:
            summary = self._join_gradients(inner)
            if summary.all_leaving:
                break
            if self.blocks is not None and summary.weight > 0 and any(h.kind == last for h in summary.headers):
                self._advance(self.blocks, idle=True)
            self._retune(0)
        self._land_all()
        parts = self._parts if self.blocks is None else [state.fragment for state in self.blocks.outer_states]
        self._even_out(inner.transport, summary, parts)

    def _leave_blocks(self, blocks: Blocks) -> None:
        """Exchange every fragment once more after all have left, whoever comes last with work."""
        quiet = 0
        while quiet < len(blocks.updates):
            self._hear_blocks(blocks, rests=True)
            summary = self._end_block(leaving=True)
            assert summary is not None
            quiet = quiet + 1 if summary.all_leaving else 0
        global_model.settle(blocks.global_parts)

    def _join_gradients(self, exchanger: Exchanger) -> ExchangeSummary:
        """Come to an exchange of gradients with nothing in hand."""
        pending_header = exchanger.open(self._bare_header(NO_PAYLOAD, leaving=True))
        summary = pending_header.summary()
        return summary if summary.empty else self.gradients[summary.kind.optimizer].join(pending_header)

    def _bare_header(self, kind: Kind, leaving: bool) -> Header:
        """A header without a payload behind it."""
        return Header(0, kind, False, leaving, True, 0, 0.0, 0.0, self._flow.steps, 0)

    def _even_out(self, transport: Transport, summary: ExchangeSummary, parts: list[Fragment]) -> None:
        """Workers that made fewer steps take what one has that made the most."""
        totals = [h.total for h in summary.headers]
        if len(set(totals)) > 1:
            agreement.broadcast_start(transport, parts, totals.index(max(totals)))

    def close(self) -> None:
        """Unhook, and end what works in the background."""
        self.closed = True
        ending.release(self._owned)
        self._stop_gradients()
        self._exchanger.close()
        if self._inner is not None:
            self._inner.close()

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        for update in self.gradients:
            update.withdraw()
        return {
            "blocks": saved.save(self.blocks) if self.blocks is not None else [],
            "gradients": [update.state() for update in self.gradients],
            "sequence": [one.sequence for one in (self._exchanger, self._inner) if one is not None],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave; after the optimizers' own."""
        if self.blocks is not None:
            saved.load(self.blocks, state["blocks"])
        self._follow_flow()
        for update, row in zip(self.gradients, state["gradients"], strict=True):
            update.load(row)
        exchangers = [one for one in (self._exchanger, self._inner) if one is not None]
        for exchanger, sequence in zip(exchangers, state["sequence"], strict=True):
            exchanger.sequence = sequence

    def _follow_flow(self) -> None:
        """After a warm-up gradients are exchanged within hosts only."""
        if self._flow.warm and self.rule.schedule.warmup:
            self._stop_gradients()
            if self._inner is not None:
                self._exchange_gradients(self._inner)

    def reshard(self, old: Old) -> Callable[[], None]:
        """Read and check what another number of workers saved; what is returned puts it in its place.

        The user's model is to hold the global model by then, and the optimizers the state that goes on.
        """
        warming = self.rule.schedule.warmup > 0 and not old.part(0, "flow", 1)  # blocks have not begun
        rows = saved.read(self.blocks, old) if self.blocks is not None and not warming else []
        sequence = int(old.part(0, "exchange", "sequence", 0) or 0)
        names = ("order", "usual", "expected", "exchanges", "norms")
        gradients = [
            {name: old.part(0, "exchange", "gradients", k, name) for name in names} for k in range(len(self._owned))
        ]

        def put() -> None:
            if self.blocks is not None:
                saved.reshard(self.blocks, rows)
            self._follow_flow()
            for update, row in zip(self.gradients, gradients, strict=False):
                if row["order"] is not None:
                    update.regroup(row)
            self._exchanger.sequence = sequence

        return put

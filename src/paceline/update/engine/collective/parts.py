# SPDX-License-Identifier: Apache-2.0
"""The parts of the engine of workers that exchange together, and how they are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.communication import Transport
from paceline.core import kernels
from paceline.core.flat import Fragment
from paceline.core.shards import Shards
from paceline.rules.codec import Dense
from paceline.rules.rule import Rule
from paceline.rules.topology import Flat
from paceline.update.engine import agreement
from paceline.update.engine.blocks.exchanges import BlockExchanges
from paceline.update.engine.blocks.fragmented_model import FragmentedModel
from paceline.update.engine.blocks.retuning import Retuning
from paceline.update.engine.collective.handover import Handover
from paceline.update.engine.common_start import begin_together
from paceline.update.engine.context import RunContext
from paceline.update.engine.gradients.exchanges import GradientExchanges
from paceline.update.exchange.exchanger import Exchanger
from paceline.update.exchange.header import ExchangeHeader, ExchangeSummary
from paceline.update.exchange.kind import WARMUP_END, ExchangeKind


@dataclass
class Parts:
    """The parts of the engine of workers that exchange together; a choice of the rule during the run changes them.

    Attributes:
        run: the context that all parts of the run share.
        fragments: the trained parameters and numeric buffers.
        exchanger: the connection among all workers.
        host: the connection among the processes of this host, if they are one worker and any host has several.
        gradients: the exchanges of gradients.
        blocks: those of blocks, if the rule has blocks and there are several workers.
        retuning: changes the rule's numbers.
        handover: gives workers the state of others.
        missed: steps of the other workers in the passes so far that this one did not make, under a block rule.
        told: whether the user was told of skipped minibatches.
    """

    run: RunContext
    fragments: list[Fragment]
    exchanger: Exchanger
    host: Exchanger | None
    gradients: GradientExchanges
    blocks: BlockExchanges | None
    retuning: Retuning
    handover: Handover
    missed: int = field(default=0, init=False)
    told: bool = field(default=False, init=False)

    @property
    def exchangers(self) -> list[Exchanger]:
        """All connections."""
        return [self.exchanger] if self.host is None else [self.exchanger, self.host]

    @property
    def outer_fragments(self) -> list[Fragment]:
        """The tensors that must be equal on all workers when blocks begin or end."""
        if self.blocks is None:
            return self.fragments
        return [state.fragment for state in self.blocks.blocks.outer_states]

    def bare_header(self, kind: ExchangeKind, leaving: bool, checksum: int = 0, minibatches: int = 0) -> ExchangeHeader:
        """A header without a payload."""
        return ExchangeHeader(0, kind, False, leaving, True, minibatches, 0.0, 0.0, self.run.progress.steps, checksum)

    def end_warmup(self, summary: ExchangeSummary) -> None:
        """The warm-up is over: all workers, also leaving ones, take the same start for the first block."""
        progress = self.run.progress
        if (rule := self.run.tuner.take_choice()) is not None:
            self.adopt(rule)
        progress.warm = True
        if self.blocks is not None:
            blocks = self.blocks.blocks
            if any(header.total for header in summary.headers):  # else it is as at attach
                blocks.prepare()
                even_out(self.run.transport, summary, self.outer_fragments)
                blocks.capture()
            blocks.entered = [progress.steps] * len(blocks.updates)
        self._leave_lockstep()
        self.gradients.context.read_requests(summary)
        self.retuning.apply(0)

    # -- a rule that a probe chooses --------------------------------------------------------------

    def follow_choice(self) -> None:
        """After a step: let a choice of the rule take effect, if one was made."""
        choice = self.run.tuner.measured.chosen
        if choice is None:
            return
        if not choice.lockstep:
            self.end_warmup(self.exchanger.meet(self.bare_header(WARMUP_END, leaving=False)))
        elif (rule := self.run.tuner.take_choice()) is not None:
            self.adopt(rule)

    def adopt(self, rule: Rule) -> None:
        """Continue with another schedule, codec or overlap; blocks, if there are any, begin anew."""
        blocks, builds = None, self._builds(rule)
        if builds or self.blocks is not None:
            old, self.exchanger = self.exchanger, _exchanger(self.run, rule)
            self.exchanger.sequence, self.exchanger.left = old.sequence, old.left
            self.exchanger.departures = old.departures
            old.close()
        if builds:
            blocks = blocks_of(self.run, rule, self.exchanger)
        self.retuning.begin(rule, blocks)
        if self.blocks is not None:
            self.blocks.blocks.release()
        self.blocks = None
        if blocks is not None:
            self.blocks = BlockExchanges(self.run, blocks, self.exchanger, self.retuning)
        self._follow_schedule(rule)

    def follow(self, rule: Rule) -> None:
        """Continue with the rule of a checkpoint."""
        now = self.retuning.rule
        same = (rule.codec, rule.schedule.overlap) == (now.codec, now.schedule.overlap)
        if self.run.tuner.measured.chooser is None or (same and (self.blocks is not None) == self._builds(rule)):
            self.retuning.follow(rule)
            self._follow_schedule(rule)
        else:
            self.adopt(rule)

    def _builds(self, rule: Rule) -> bool:
        """Whether there are blocks, or will be after a warm-up."""
        return rule.schedule.exchanges_blocks and not self.run.tuner.measured.probing

    def _follow_schedule(self, rule: Rule) -> None:
        if self.run.tuner.measured.chooser is None:
            return
        progress = self.run.progress
        progress.schedule = rule.schedule
        progress.warm = progress.warm and self._builds(rule)
        if progress.lockstep and not self.gradients.running:
            self.gradients.start(self.exchanger)

    def follow_progress(self) -> None:
        """After a warm-up gradients are exchanged within hosts only."""
        chosen = self.run.tuner.measured.chooser is not None and not self.run.progress.lockstep
        if chosen or (self.run.progress.warm and self.retuning.rule.schedule.warmup):
            self._leave_lockstep()

    def _leave_lockstep(self) -> None:
        self.gradients.stop()
        if self.host is not None:
            self.gradients.start(self.host)


def even_out(transport: Transport, summary: ExchangeSummary, fragments: Sequence[Fragment]) -> None:
    """Workers that made fewer steps take the values of one that made the most; of buffers that are not averaged, which
    a program may write after its backward pass, all take that one's."""
    totals = [h.total for h in summary.headers]
    taken = fragments if len(set(totals)) > 1 else [part for part in fragments if part.from_rank_0]
    agreement.broadcast_start(transport, taken, totals.index(max(totals)))


def assemble(run: RunContext) -> Parts:
    """Check that all workers attached the same, give them rank 0's model, and build the engine's parts."""
    rule, settings, transport = run.rule, run.settings, run.transport
    same: dict[str, Any] = {"seed": settings.seed, "outer_state": settings.outer_state, "guard": str(settings.guard)}
    devices = [settings.outer_state_device] if settings.outer_state_device else _devices(run)
    same[f"kernels ({kernels.SWITCH}=0 turns Triton's off)"] = kernels.arithmetic(devices)
    if shards := Shards(parameter for _, named in run.owned for _, parameter in named):
        same["shard"] = shards.place
    fragments = begin_together(transport, rule, run.model, run.owned, same)
    exchanger = _exchanger(run, rule)
    host = _within_host(run) if rule.settings.within else None
    blocks = None if run.tuner.measured.probing else blocks_of(run, rule, exchanger)
    if blocks is not None:  # moments of before attach are rank 0's on all workers
        agreement.broadcast_start(transport, [state.fragment for state in blocks.moment_states])
        blocks.capture_moments()
    retuning = Retuning(run, blocks)
    gradients = GradientExchanges(run, within_host=host is not None)
    parts = Parts(
        run,
        fragments,
        exchanger,
        host,
        gradients,
        BlockExchanges(run, blocks, exchanger, retuning) if blocks is not None else None,
        retuning,
        Handover(run, gradients),
    )
    if run.progress.lockstep:
        gradients.start(exchanger)
    elif host is not None:
        gradients.start(host)
    if host is not None and host.transport.world.size == transport.world.size:
        host.asks = exchanger.asks
    return parts


def _devices(run: RunContext) -> set[torch.device]:
    """The devices of the model's trained parameters."""
    return {parameter.device for _, named in run.owned for _, parameter in named}


def _exchanger(run: RunContext, rule: Rule) -> Exchanger:
    """The connection among all workers."""
    exchanger = Exchanger(run.transport, rule.codec, rule.common, rule.schedule.overlap > 0, _devices(run))
    exchanger.asks, exchanger.place, exchanger.made = (
        lambda: run.tuner.asks,
        run.loaders.place,
        lambda: run.loaders.made,
    )
    return exchanger


def _within_host(run: RunContext) -> Exchanger | None:
    """The connection among the processes of this host, if any host has several."""
    hosts = run.transport.world.hosts
    names = list(dict.fromkeys(hosts))
    if len(names) == len(hosts):
        return None
    part = run.transport.part([[rank for rank, host in enumerate(hosts) if host == name] for name in names])
    exchanger = Exchanger(part, Dense(), Flat(run.rule.common.chunks), devices=_devices(run))
    exchanger.place, exchanger.made = run.loaders.place, lambda: run.loaders.made
    return exchanger


def blocks_of(run: RunContext, rule: Rule, exchanger: Exchanger) -> FragmentedModel | None:
    """The blocks; None where no worker exchanges any."""
    world = run.transport.world
    workers = len(set(world.hosts)) if rule.settings.within else world.size  # N, as the rule counts them
    if not rule.schedule.exchanges_blocks or not rule.exchanges_among(workers):
        return None
    blocks = FragmentedModel(rule, exchanger, run.model, run.owned, run.settings, workers)
    for update in blocks.updates:
        update.receipts = run.receipts
    return blocks

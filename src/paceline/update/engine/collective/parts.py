# SPDX-License-Identifier: Apache-2.0
"""The parts of the engine of workers that exchange together, and how they are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.communication import Transport
from paceline.core.flat import Fragment
from paceline.rules.codec import Dense
from paceline.rules.topology import Flat
from paceline.update.engine import agreement
from paceline.update.engine.blocks.exchanges import BlockExchanges
from paceline.update.engine.blocks.fragmented_model import FragmentedModel
from paceline.update.engine.blocks.retuning import Retuning
from paceline.update.engine.common_start import begin_together
from paceline.update.engine.context import RunContext
from paceline.update.engine.gradients.exchanges import GradientExchanges
from paceline.update.exchange.exchanger import Exchanger
from paceline.update.exchange.header import ExchangeHeader, ExchangeSummary
from paceline.update.exchange.kind import ExchangeKind


@dataclass(frozen=True)
class Parts:
    """The parts of the engine of workers that exchange together.

    Attributes:
        run: the context that all parts of the run share.
        fragments: the trained parameters and numeric buffers.
        exchanger: the connection among all workers.
        host: the connection among the processes of this host, if they are one worker and any host has several.
        gradients: the exchanges of gradients.
        blocks: those of blocks, if the rule has blocks and there are several workers.
        retuning: changes the rule's numbers.
    """

    run: RunContext
    fragments: list[Fragment]
    exchanger: Exchanger
    host: Exchanger | None
    gradients: GradientExchanges
    blocks: BlockExchanges | None
    retuning: Retuning

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

    def bare_header(self, kind: ExchangeKind, leaving: bool, checksum: int = 0) -> ExchangeHeader:
        """A header without a payload."""
        return ExchangeHeader(0, kind, False, leaving, True, 0, 0.0, 0.0, self.run.progress.steps, checksum)

    def end_warmup(self, summary: ExchangeSummary) -> None:
        """The warm-up is over: all workers, also leaving ones, take the same start for the first block."""
        progress = self.run.progress
        progress.warm = True
        if self.blocks is not None:
            blocks = self.blocks.blocks
            blocks.prepare()
            even_out(self.run.transport, summary, self.outer_fragments)
            blocks.capture()
            blocks.entered = [progress.steps] * len(blocks.updates)
        self.follow_progress()
        self.gradients.context.read_requests(summary)
        self.retuning.apply(0)

    def follow_progress(self) -> None:
        """After a warm-up gradients are exchanged within hosts only."""
        if self.run.progress.warm and self.retuning.rule.schedule.warmup:
            self.gradients.stop()
            if self.host is not None:
                self.gradients.start(self.host)


def even_out(transport: Transport, summary: ExchangeSummary, fragments: Sequence[Fragment]) -> None:
    """Workers that made fewer steps take the values of one that made the most."""
    totals = [h.total for h in summary.headers]
    if len(set(totals)) > 1:
        agreement.broadcast_start(transport, fragments, totals.index(max(totals)))


def assemble(run: RunContext) -> Parts:
    """Check that all workers attached the same, give them rank 0's model, and build the engine's parts."""
    rule, settings, transport = run.rule, run.settings, run.transport
    same = {"seed": settings.seed, "outer_state": settings.outer_state, "guard": str(settings.guard)}
    fragments = begin_together(transport, rule, run.model, run.owned, same)
    exchanger = Exchanger(transport, rule.codec, rule.common, overlapped=rule.schedule.overlap > 0)
    host = _within_host(run) if rule.within else None
    blocks = _blocks(run, exchanger)
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
    )
    if run.progress.lockstep:
        gradients.start(exchanger)
    elif host is not None:
        gradients.start(host)
    for one in parts.exchangers:
        if one.transport.world.size == transport.world.size:
            one.asks = lambda: run.tuner.asks
    return parts


def _within_host(run: RunContext) -> Exchanger | None:
    """The connection among the processes of this host, if any host has several."""
    hosts = run.transport.world.hosts
    names = list(dict.fromkeys(hosts))
    if len(names) == len(hosts):
        return None
    part = run.transport.part([[rank for rank, host in enumerate(hosts) if host == name] for name in names])
    return Exchanger(part, Dense(), Flat(run.rule.common.chunks))


def _blocks(run: RunContext, exchanger: Exchanger) -> FragmentedModel | None:
    """The blocks, with the moments that existed at attach; None for a single worker."""
    world = run.transport.world
    workers = len(set(world.hosts)) if run.rule.within else world.size  # N, as the rule counts them
    if not run.rule.schedule.exchanges_blocks or workers == 1:
        return None
    blocks = FragmentedModel(run.rule, exchanger, run.model, run.owned, run.settings, workers)
    agreement.broadcast_start(run.transport, [state.fragment for state in blocks.moment_states])
    blocks.capture_moments()
    return blocks

# SPDX-License-Identifier: Apache-2.0
"""The end of a pass, and of a run, of workers that exchange together: each keeps joining exchanges until all are there.

A worker may come to the end of its pass before the others: it had fewer batches, or its program skipped some. Without
this, its first exchange of the next pass would meet the others' last one of this pass. So it joins with an empty
contribution (under block rules with what it has made so far) until all workers are at their end. Workers that have made
fewer steps then take over the model, the optimizers and the schedules of one that has made the most.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch

from paceline.communication import Transport
from paceline.core.flat import Fragment
from paceline.core.world import World
from paceline.data.sharing.place import INSIDE, LEFT, Place, pack
from paceline.errors import MismatchError
from paceline.update.engine.blocks.exchanges import BlockExchanges
from paceline.update.engine.collective.parts import Parts, even_out
from paceline.update.engine.gradients.footer import SKIPPED
from paceline.update.exchange.checksum import combine, of_tensors
from paceline.update.exchange.exchanger import Exchanger
from paceline.update.exchange.header import ExchangeSummary
from paceline.update.exchange.kind import NO_PAYLOAD, WARMUP_END, ExchangeKind

logger = logging.getLogger("paceline")


def shut_down(parts: Parts) -> None:
    """End the run together: wait for workers that have more data, and merge the rest of the last block."""
    Joining(parts, leaving=True).join_all()
    sums = [of_tensors(part) for part in parts.fragments]
    if parts.blocks is not None and not parts.run.progress.lockstep:
        sums.append(torch.tensor(parts.blocks.blocks.checksum()))
    # no exchange follows: this one compares the final bits of all workers
    summary = parts.exchanger.meet(parts.bare_header(NO_PAYLOAD, leaving=True, checksum=combine(sums)))
    parts.exchanger.departures.check_ends(summary, parts.exchanger.transport.world)


def end_pass(parts: Parts) -> None:
    """Wait until all workers are at the end of their pass."""
    with _gradients_aside(parts):
        Joining(parts, leaving=False).join_all()


@contextlib.contextmanager
def _gradients_aside(parts: Parts) -> Iterator[None]:
    """Context in which no parameter has a gradient; restores those that the program has accumulated."""
    held = [(p, p.grad) for _, named in parts.run.owned for _, p in named if p.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for _, named in parts.run.owned:
            for _, parameter in named:
                parameter.grad = None
        for parameter, gradient in held:
            parameter.grad = gradient


class Joining:
    """Joins exchanges at the end of a pass or of the run.

    Args:
        parts: of the engine.
        leaving: whether the run ends for this worker; else a pass.
    """

    def __init__(self, parts: Parts, leaving: bool) -> None:
        self._parts, self._leaving = parts, leaving
        self._joined = set[int]()  # the steps whose gradients were exchanged without this worker

    def join_all(self) -> None:
        """Join until all workers are there."""
        parts, progress = self._parts, self._parts.run.progress
        for withdrawn in parts.gradients.withdraw():
            self._joined |= {h.total for h in withdrawn.headers if h.brings}
        if self._leaving and parts.blocks is not None:
            parts.blocks.land_all()
        if progress.lockstep and self._join_lockstep():
            return
        if parts.host is not None:
            self._join_host(parts.host)
        if parts.blocks is not None:
            self._join_blocks(parts.blocks)

    def _join_lockstep(self) -> bool:
        """Join the gradient exchanges of workers that have more data, until all are there or the warm-up is over;
        whether all are there."""
        parts = self._parts
        while parts.run.progress.lockstep:
            summary = self._join_gradients(parts.exchanger)
            if any(h.kind == WARMUP_END for h in summary.headers):
                parts.end_warmup(summary)
            elif summary.empty:
                self._even_out(parts.exchanger.transport, summary, parts.fragments)
                if summary.all_leaving or not self._leaving:
                    return True
            parts.retuning.apply(0)
            measured = parts.run.tuner.measured
            if measured.chosen is not None and measured.chosen.lockstep:
                parts.follow_choice()  # but blocks begin when the others meet
        return False

    def _join_host(self, host: Exchanger) -> None:
        """Join the steps of this host, and its blocks, until all its processes are there; then hold the same values."""
        parts = self._parts
        last = ExchangeKind.gradients(len(parts.run.owned) - 1)
        while True:
            summary = self._join_gradients(host)
            if summary.empty:
                if parts.blocks is not None and (summary.all_leaving or _steps_differ(summary)):
                    parts.blocks.land_all()
                self._even_out(host.transport, summary, parts.outer_fragments)
                if summary.all_leaving or not self._leaving:
                    return
            elif parts.blocks is not None and summary.weight > 0 and any(h.kind == last for h in summary.headers):
                parts.blocks.advance(idle=True)
            parts.retuning.apply(0)

    def _join_gradients(self, exchanger: Exchanger) -> ExchangeSummary:
        """Join an exchange of gradients with an empty contribution."""
        parts = self._parts
        header = parts.bare_header(NO_PAYLOAD, self._leaving, minibatches=len(self._joined))
        summary = parts.gradients.join(exchanger.open(header))
        self._joined |= {h.total for h in summary.headers if h.brings}
        return summary

    def _join_blocks(self, blocks: BlockExchanges) -> None:
        """Join the blocks of the others until all workers are there."""
        parts = self._parts
        if self._leaving:
            blocks.finish()
            return
        summary = blocks.wait(parts.run.progress.steps + parts.missed)
        if _steps_differ(summary):
            blocks.merge()
            totals, rank = [h.total for h in summary.headers], parts.exchanger.transport.world.rank
            parts.missed += max(totals) - totals[rank]
            if not any(h.leaving for h in summary.headers):
                parts.handover.give(totals.index(max(totals)), totals[rank] < max(totals), state=False)

    # -- workers that have made fewer steps -------------------------------------------------------

    def _even_out(self, transport: Transport, summary: ExchangeSummary, fragments: Sequence[Fragment]) -> None:
        """Workers that made fewer steps take over from one that made the most."""
        if not _steps_differ(summary):
            even_out(transport, summary, fragments)
            return
        totals, world = [h.total for h in summary.headers], transport.world
        most = max(totals)
        stayed = [rank for rank, h in enumerate(summary.headers) if h.total + h.minibatches < most]
        if stayed:
            raise MismatchError(world.sign(f"{world.names(stayed)} {SKIPPED}"))
        source = totals.index(most)
        even_out(transport, summary, fragments)
        if not summary.all_leaving:
            self._parts.handover.give(source, totals[world.rank] < most, transport)
            self._parts.run.progress.follow(most)
            self._joined.clear()
            self._tell_skips(summary, most, world)

    def _tell_skips(self, summary: ExchangeSummary, most: int, world: World) -> None:
        """Say once that workers have skipped minibatches: what the program counts by itself lacks them."""
        places = [Place.unpack(h.place or pack(0, 0, INSIDE)) for h in summary.headers]
        furthest = places[[h.total for h in summary.headers].index(most)].batches
        missed = [max(0, furthest - place.batches) + (place.state == LEFT) for place in places]  # left before its step
        skips = [rank for rank, h in enumerate(summary.headers) if not h.leaving and most - h.total > missed[rank]]
        if skips and not self._parts.told and world.rank == 0:
            logger.warning(
                "%s",
                world.sign(
                    f"{world.names(skips)} skipped minibatches of a pass, and made fewer steps than others: it takes "
                    "over their model, optimizer and schedules. What the program counts or averages by itself at each "
                    "step (a moving average of the weights) goes on without those steps"
                ),
            )
        self._parts.told = self._parts.told or bool(skips)


def _steps_differ(summary: ExchangeSummary) -> bool:
    return len({h.total for h in summary.headers}) > 1

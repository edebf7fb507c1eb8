# SPDX-License-Identifier: Apache-2.0
"""The end of a run of workers that exchange together: each keeps joining exchanges until all are done."""

from __future__ import annotations

import torch

from paceline.update.engine.collective.parts import Parts, even_out
from paceline.update.exchange.checksum import combine, of_tensors
from paceline.update.exchange.exchanger import Exchanger
from paceline.update.exchange.header import ExchangeSummary
from paceline.update.exchange.kind import NO_PAYLOAD, WARMUP_END, ExchangeKind


def shut_down(parts: Parts) -> None:
    """End the run together: wait for workers that have more data, and merge the rest of the last block."""
    progress = parts.run.progress
    parts.gradients.withdraw()
    if parts.blocks is not None:
        parts.blocks.land_all()
    over = False
    while not over:  # a probe may end meanwhile, or begin
        if progress.lockstep:
            over = _finish_lockstep(parts)
        elif parts.host is not None:
            _finish_host(parts, parts.host)
        if not progress.lockstep:
            over = parts.blocks is None or parts.blocks.finish()
        if not over and parts.run.tuner.measured.again:
            parts.probe_again(leaving=True)
    sums = [of_tensors(part) for part in parts.fragments]
    if parts.blocks is not None and not progress.lockstep:
        sums.append(torch.tensor(parts.blocks.blocks.checksum()))
    # no exchange follows: this one compares the final bits of all workers
    parts.exchanger.meet(parts.bare_header(NO_PAYLOAD, leaving=True, checksum=combine(sums)))


def _finish_lockstep(parts: Parts) -> bool:
    """Join the gradient exchanges of workers that have more data, until all have left or the warm-up is over; whether
    all have left."""
    while parts.run.progress.lockstep:
        summary = _join_gradients(parts, parts.exchanger)
        if any(h.kind == WARMUP_END for h in summary.headers):
            parts.end_warmup(summary)
        elif summary.all_leaving:
            even_out(parts.run.transport, summary, parts.fragments)
            return True
        parts.retuning.apply(0)
        measured = parts.run.tuner.measured
        if measured.again or (measured.chosen is not None and measured.chosen.lockstep):
            parts.follow_choice()  # but blocks begin when the others meet
    return False


def _finish_host(parts: Parts, host: Exchanger) -> None:
    """Join the steps of this host, and its blocks, until all its processes have left; then hold the same values."""
    last = ExchangeKind.gradients(len(parts.run.owned) - 1)
    while True:
        summary = _join_gradients(parts, host)
        if summary.all_leaving:
            break
        if parts.blocks is not None and summary.weight > 0 and any(h.kind == last for h in summary.headers):
            parts.blocks.advance(idle=True)
        parts.retuning.apply(0)
    if parts.blocks is not None:
        parts.blocks.land_all()
    even_out(host.transport, summary, parts.outer_fragments)


def _join_gradients(parts: Parts, exchanger: Exchanger) -> ExchangeSummary:
    """Join an exchange of gradients with an empty contribution."""
    return parts.gradients.join(exchanger.open(parts.bare_header(NO_PAYLOAD, leaving=True)))

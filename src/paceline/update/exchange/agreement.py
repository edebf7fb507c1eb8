# SPDX-License-Identifier: Apache-2.0
"""Whether all workers may apply an exchange: same sequence, same checksums, a finite contribution."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from paceline.communication.calls import check_alike
from paceline.core.world import World
from paceline.data.sharing.place import pass_number
from paceline.errors import DesyncError, MismatchError, NonFiniteError
from paceline.update.exchange.header import ExchangeHeader, ExchangeSummary
from paceline.update.exchange.kind import NO_PAYLOAD
from paceline.update.exchange.outliers import outliers


def refuse_nothing(summary: ExchangeSummary, world: World) -> None:
    """Raise `NonFiniteError` where no worker brought a contribution that can be averaged."""
    if not summary.empty and all(not h.finite for h in summary.headers if h.brings) and summary.weight == 0:
        raise NonFiniteError(
            world.sign(
                f"the contributions of all workers to exchange {summary.headers[0].sequence} hold inf or nan, so "
                "nothing is left to average; the global model is as it was before the block. Lower the learning rate, "
                "clip gradients, or resume from a checkpoint"
            )
        )


@lru_cache(maxsize=4)
def summary_of(rows: bytes, size: int) -> ExchangeSummary:
    """The summary of the headers of `size` workers, from their rows; virtual workers share it."""
    table = torch.frombuffer(bytearray(rows), dtype=torch.int64).view(size, -1).tolist()
    return with_outliers_dropped(ExchangeSummary(tuple(ExchangeHeader.unpack(row) for row in table)).with_joined)


def with_outliers_dropped(summary: ExchangeSummary) -> ExchangeSummary:
    """The summary with the factor 0 for contributions far larger than usual and far larger than the other workers'."""
    said = {rank: (h.norm, h.usual) for rank, h in enumerate(summary.headers) if h.brings and h.finite and h.factor}
    out = outliers(said)
    if not out:
        return summary
    headers = (replace(h, factor=0.0) if rank in out else h for rank, h in enumerate(summary.headers))
    return replace(summary, headers=tuple(headers))


def agree(summary: ExchangeSummary, world: World) -> None:
    """Raise where workers are at different places of the program, or hold different bits."""
    if summary.alike:
        return
    headers = summary.headers
    check_alike([h.kind.code for h in headers], [h.leaving for h in headers], world)
    places = {(h.sequence, h.kind) for h in headers if h.brings} or {(h.sequence, NO_PAYLOAD) for h in headers}
    if len(places) > 1 or len({h.sequence for h in headers}) > 1:
        said = "; ".join(f"{world.name(r)} at exchange {h.sequence}" for r, h in enumerate(headers))
        raise MismatchError(world.sign(f"the workers are at different places of the program: {said}"))
    passes = {rank: pass_number(h.place) for rank, h in enumerate(headers) if h.brings and h.place and not h.leaving}
    if len(set(passes.values())) > 1:
        said = "; ".join(f"{world.name(r)} in pass {number}" for r, number in passes.items())
        raise MismatchError(
            world.sign(
                f"the workers are in different passes over their data: {said}. Every worker has to begin each pass, "
                "and to end it: take run.share out of `if run.world.rank == 0:` or whatever keeps some workers from it"
            )
        )
    sums = {rank: h.checksum for rank, h in enumerate(headers) if h.checksum or not h.at_end}
    compare(sums, headers[0].sequence, world)


def compare(sums: dict[int, int], sequence: int, world: World) -> None:
    """Raise `DesyncError` where checksums (by rank) of replicated state differ."""
    values = list(sums.values())
    if len(set(values)) > 1:
        usual = max(set(values), key=lambda s: (values.count(s), -values.index(s)))
        odd = [rank for rank, s in sums.items() if s != usual]
        raise DesyncError(
            world.sign(
                f"workers that should hold the same global model do not: {world.names(odd)} differ from the others "
                f"at exchange {sequence}. Something wrote to the model outside of the optimizer's step, "
                "or memory is faulty. Resume all workers from the last checkpoint"
            )
        )

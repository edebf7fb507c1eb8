# SPDX-License-Identifier: Apache-2.0
"""The footer of a gradient exchange: what a worker knows only after its backward pass."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.world import World
from paceline.errors import MismatchError
from paceline.update.exchange.agreement import compare
from paceline.update.exchange.header import ExchangeSummary

_FLOAT, _INTEGER = struct.Struct("<f"), struct.Struct("<I")
SKIPPED = (
    "made no step after a backward pass, and other workers did. Skip a step on all workers or on none: after "
    "backward() all hold the same gradients, so decide by them (their norm, isfinite), and not by one worker's loss"
)
"""Follows the names of such workers."""


@dataclass(frozen=True)
class Footer:
    """A worker's footer, sent after all of its gradients.

    Attributes:
        finite: whether they were free of inf and nan.
        stale: whether one changed after it had been sent.
        presence: checksum of which parameters have a gradient.
        passes: backward passes since the last step.
        checksum: of the parameters, 0 where not taken.
        usual: whether the norm is no outlier.
        norm: of the gradients, with the precision of 32 bits; 0 where not judged.
        overflowed: whether they were not finite and every worker's GradScaler must skip the step.
        buffers: whether the worker's buffers were sent with the weight of its header.
        rate: sum of the learning rates of the optimizer's groups, with the precision of 32 bits; 0 if unknown.
    """

    finite: bool = True
    stale: bool = False
    presence: int = 0
    passes: int = 0
    checksum: int = 0
    usual: bool = True
    norm: float = 0.0
    overflowed: bool = False
    buffers: bool = True
    rate: float = 0.0

    @property
    def row(self) -> Tensor:
        """As it is sent: int64, shape (5,)."""
        condition = self.finite | self.usual << 1 | _to_bits(self.norm) << 2
        flags = self.stale | self.overflowed << 1 | self.buffers << 2 | _to_bits(self.rate) << 3
        return torch.tensor([condition, int(flags), self.presence, self.passes, self.checksum])

    @classmethod
    def unpack(cls, row: list[int]) -> Footer:
        """The inverse of `row`."""
        finite, usual = (bool(row[0] >> bit & 1) for bit in range(2))
        stale, overflowed, buffers = (bool(row[1] >> bit & 1) for bit in range(3))
        norm, rate = _from_bits(row[0] >> 2), _from_bits(row[1] >> 3)
        return cls(finite, stale, row[2], row[3], row[4], usual, norm, overflowed, buffers, rate)


def _to_bits(number: float) -> int:
    return int(_INTEGER.unpack(_FLOAT.pack(min(number, 3e38)))[0])


def _from_bits(bits: int) -> float:
    return float(_FLOAT.unpack(_INTEGER.pack(bits))[0])


def with_footers(summary: ExchangeSummary, footers: Sequence[Footer]) -> ExchangeSummary:
    """The summary with the footers: a worker whose gradients were not finite has weight 0.

    If one has overflowed under a GradScaler, all weights are 0: all workers skip the step.
    """
    if any(f.overflowed for f in footers):
        return ExchangeSummary(tuple(replace(h, factor=0.0) for h in summary.headers))
    return ExchangeSummary(
        tuple(
            replace(h, finite=f.finite, factor=h.factor if f.finite else 0.0, norm=f.norm, usual=f.usual)
            for h, f in zip(summary.headers, footers, strict=True)
        )
    )


def of_buffers(summary: ExchangeSummary, footers: Sequence[Footer]) -> ExchangeSummary:
    """The summary with the weights of the sent buffers, also if gradients are rejected."""
    pairs = zip(summary.headers, footers, strict=True)
    return ExchangeSummary(tuple(replace(h, factor=h.factor if f.buffers else 0.0) for h, f in pairs))


def check_same_step(summary: ExchangeSummary, footers: Sequence[Footer], world: World) -> None:
    """Raise an error if workers are at different steps or rates, or hold different parameters."""
    steps = {rank: h.total for rank, h in enumerate(summary.headers) if h.brings}
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

# SPDX-License-Identifier: Apache-2.0
"""Deep gradient compression: the k largest numbers, with momentum before the choice.

    u <- m u + g,            v <- v + u                    momentum correction; v is the residual
    Nesterov:  u <- m (u + g),   v <- v + u + g
    send (index, v) of the k largest |v|;  at these places  v <- 0,  u <- 0          momentum factor masking
    total = sum of all workers' pairs

k = ceil(ratio n) of the n numbers of the whole chunk, not of each matrix: the largest numbers of all, and one message
of known size. Of equal magnitudes the first ones are taken. With m = 0 this is top-k with error feedback, and
sent + residual = given; with momentum it replaces the optimizer's (set that to 0).

The exchange is one-sided: every worker gets every worker's pairs and adds them in rank order, so nothing is lost on the
way. Bytes: (N-1) 8 k, an index (int32) and a value (float32) for each number. Chunks must be shorter than 2^31 numbers.

Sparsity warm-up: `warmup=((500, 0.25), (500, 0.063))` sends more in the first exchanges; `warmup=500` is the
publication's sequence .25, .063, .015, .004 (an epoch each there), as far as it is above `ratio`.

Source: Lin, Han, Mao, Wang & Dally, ICLR 2018, arXiv 1712.01887. Where we differ: the k are exactly the largest (a
sample finds a threshold a little too low, what is above it is sorted out exactly); no local clipping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.parse import check, check_bool, check_number, is_number, is_whole
from paceline.errors import RuleError
from paceline.rules.codec.base import State, Steps, Wire
from paceline.rules.codec.layout import Layout
from paceline.rules.codec.select import largest

PAPER_RATIOS = (0.25, 0.063, 0.015, 0.004)
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class TopK:
    """The k largest numbers of the chunk.

    Attributes:
        ratio: share of the numbers that is sent, above 0 and at most 1.
        momentum: m, of the workers' own momentum; 0 for none.
        nesterov: Nesterov's form of it.
        warmup: (exchanges, ratio) pairs before `ratio` holds, or exchanges for each of the publication's ratios.
        feedback: whether the unsent rest is kept.
    """

    exact = False
    operations = 1
    whole = False

    ratio: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    warmup: int | tuple[tuple[int, float], ...] = ()
    feedback: bool = True

    def __post_init__(self) -> None:
        _check_ratio(self.ratio, "ratio")
        check_number("momentum", self.momentum, 0, 1)
        check_bool("nesterov", self.nesterov)
        check_bool("feedback", self.feedback)
        if self.momentum and not self.feedback:
            raise RuleError(f"momentum {self.momentum} needs feedback, without which it would be lost; set it to 0")
        if self.nesterov and not self.momentum:
            raise RuleError("nesterov needs a momentum above 0; give both or neither")
        self._stages()

    def _stages(self) -> tuple[tuple[int, float], ...]:
        """(exchanges, ratio) of the warm-up."""
        if is_whole(self.warmup) and self.warmup > 0:
            return tuple((self.warmup, ratio) for ratio in PAPER_RATIOS if ratio > self.ratio)
        stages = self.warmup
        fits = isinstance(stages, tuple) and all(
            isinstance(one, tuple) and len(one) == 2 and is_whole(one[0]) and one[0] > 0 for one in stages
        )
        check(fits, "warmup", "a number of exchanges or pairs like ((500, 0.25), (500, 0.063))", stages)
        assert isinstance(stages, tuple)
        for _, ratio in stages:
            _check_ratio(ratio, "a ratio of warmup")
        return stages

    def at(self, number: int) -> TopK:
        """The codec with the ratio of the warm-up's stage."""
        for exchanges, ratio in self._stages():
            if number < exchanges:
                return replace(self, ratio=ratio, warmup=())
            number -= exchanges
        return replace(self, warmup=())

    def count(self, numel: int) -> int:
        """k for `numel` numbers."""
        return min(numel, math.ceil(self.ratio * numel))

    def exchange(self, x: Tensor, layout: Layout, wire: Wire, state: State) -> Steps[tuple[Tensor, State]]:
        """The sum of all workers' pairs; see :class:`paceline.rules.codec.base.Codec`."""
        k = self.count(layout.numel)
        kept: State = {}
        if self.momentum:
            kept["u"] = self._momentum(x, state)
        if self.feedback:
            if "residual" in state:
                x.add_(state["residual"])
            kept["residual"] = x
        index = largest(x, k)
        values = x[index].clamp_(-_LARGEST, _LARGEST).float()
        x[index] -= values  # 0, or a float64 number's rounding error
        if self.momentum:
            kept["u"][index] = 0

        pairs = wire.space(wire.size * 8 * k, torch.uint8, x.device).view(wire.size, 8 * k)
        pairs[0, : 4 * k] = index.to(torch.int32).view(torch.uint8)
        pairs[0, 4 * k :] = values.view(torch.uint8)
        pairs[1:] = pairs[0]
        arrived = wire.space(wire.size * 8 * k, torch.uint8, x.device)
        sizes = [8 * k] * wire.size
        yield wire.all_to_all(arrived, pairs.view(-1), sizes, sizes)

        total = wire.space(layout.numel, x.dtype, x.device).zero_()
        for pairs_of in arrived.view(wire.size, 8 * k):
            index = pairs_of[: 4 * k].clone().view(torch.int32)
            total.index_add_(0, index, pairs_of[4 * k :].clone().view(torch.float32).to(x.dtype))
        return total, kept

    def _momentum(self, x: Tensor, state: State) -> Tensor:
        """The new u; x becomes the increment of v."""
        u = state["u"] * self.momentum if "u" in state else torch.zeros_like(x)
        if not self.nesterov:
            x.add_(u)
            return x.clone()
        u.add_(x, alpha=self.momentum)
        x.add_(u)
        return u

    def bytes_sent(self, layout: Layout, workers: int, rank: int) -> int:
        """(N-1) 8 k."""
        return (workers - 1) * 8 * self.count(layout.numel)

    def describe(self, workers: int) -> str:
        momentum = f", momentum {self.momentum:g} before the choice" if self.momentum else ""
        warm = ", with a warm-up" if self._stages() else ""
        return f"the largest {100 * self.ratio:g} %{momentum}{warm}" + (", error feedback" if self.feedback else "")


def _check_ratio(ratio: float, name: str) -> None:
    check(is_number(ratio) and 0 < ratio <= 1, name, "above 0 and at most 1", ratio)

# SPDX-License-Identifier: Apache-2.0
"""Warm-up: the first exchanges are dense.

    codec_t = dense          for t < exchanges
    codec_t = codec.at(t - exchanges)             from then on

Early gradients are large and turn quickly, and what a codec does not send would be out of date when it is: CNTK trains
its first epoch, and PowerSGD its first tenth, without compression.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.core.parse import check_whole
from paceline.rules.codec.base import Codec, State, Steps, Wire
from paceline.rules.codec.dense import Dense
from paceline.rules.codec.layout import Layout


@dataclass(frozen=True)
class Warmed:
    """A codec after a number of dense exchanges.

    Attributes:
        codec: the codec.
        exchanges: dense exchanges before it.
    """

    codec: Codec
    exchanges: int

    def __post_init__(self) -> None:
        check_whole("exchanges", self.exchanges, 0)

    @property
    def exact(self) -> bool:
        return self.codec.exact

    @property
    def operations(self) -> int:
        """The codec's, which has at least the one of a dense exchange."""
        return self.codec.operations

    @property
    def whole(self) -> bool:
        """As the codec: chunks must not change when it takes over."""
        return self.codec.whole

    def at(self, number: int) -> Codec:
        """Dense, then the codec."""
        return Dense() if number < self.exchanges else self.codec.at(number - self.exchanges)

    def exchange(self, x: Tensor, layout: Layout, wire: Wire, state: State) -> Steps[tuple[Tensor, State]]:
        """The codec's, for a caller that did not ask `at`."""
        return self.codec.exchange(x, layout, wire, state)

    def bytes_sent(self, layout: Layout, workers: int, rank: int) -> int:
        """What the codec sends, after the warm-up."""
        return self.codec.bytes_sent(layout, workers, rank)

    def describe(self, workers: int) -> str:
        return f"{self.codec.describe(workers)}, after {self.exchanges} dense exchanges"

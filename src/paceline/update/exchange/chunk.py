# SPDX-License-Identifier: Apache-2.0
"""What an exchanger sends in one piece."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from paceline.rules.codec import Layout, State
from paceline.update.exchange.header import ExchangeSummary


class Chunk(Protocol):
    """A chunk of the payload, with its codec's state."""

    @property
    def layout(self) -> Layout:
        """The shapes of its tensors."""

    @property
    def lossless(self) -> bool:
        """Whether it must be sent dense, whatever the rule's codec."""

    @property
    def from_rank_0(self) -> bool:
        """Whether its sum has rank 0's part only."""

    @property
    def state(self) -> State:
        """The codec's state."""

    def fill(self, factor: float) -> Tensor:
        """This worker's contribution times `factor` (zeros where that is 0), shape (n,)."""

    def keep(self, state: State) -> None:
        """Take the codec's new state, part of which may lie in the memory that `fill` gave."""

    def land(self, total: Tensor, summary: ExchangeSummary) -> None:
        """Apply the sum over the workers, shape (n,); called after `keep`."""

    def prepare(self, total: Tensor, summary: ExchangeSummary) -> None:
        """With overlap: apply the sum to the state that the next block does not touch."""

    def move(self, made: int) -> None:
        """With overlap, at the end: apply the sum to the rest; `made` minibatches were made meanwhile."""

# SPDX-License-Identifier: Apache-2.0
"""Which exchange a header belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.communication import calls


@dataclass(frozen=True)
class ExchangeKind:
    """The exchange that a header belongs to: an optimizer's gradients, a fragment's block, or neither.

    >>> ExchangeKind.block(2).is_block, ExchangeKind.gradients(0).optimizer
    (True, 0)

    Attributes:
        code: its integer in a packed header.
    """

    code: int

    @classmethod
    def gradients(cls, optimizer: int) -> ExchangeKind:
        """The gradients of optimizer 0, 1, ..."""
        return cls(1 + optimizer)

    @classmethod
    def block(cls, fragment: int) -> ExchangeKind:
        """The block of fragment 0, 1, ..."""
        return cls(calls.BLOCK + fragment)

    @property
    def is_block(self) -> bool:
        """Whether it is the exchange of a block."""
        return self.code >= calls.BLOCK

    @property
    def joins(self) -> bool:
        """Whether the worker only joins what others exchange."""
        return self.code == 0

    @property
    def optimizer(self) -> int:
        """The optimizer whose gradients are exchanged."""
        return self.code - 1

    @property
    def fragment(self) -> int:
        """The fragment whose block is exchanged."""
        return self.code - calls.BLOCK


NO_PAYLOAD = ExchangeKind(0)
"""The worker ends, or is at the end of its pass: it brings no payload, and joins any exchange; a block with what it has
made so far."""
WARMUP_END = ExchangeKind(-1)
"""The exchange without a payload that ends a warm-up."""

# SPDX-License-Identifier: Apache-2.0
"""Which exchange a header belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.communication.calls import BLOCK


@dataclass(frozen=True)
class ExchangeKind:
    """Which exchange a header belongs to: of an optimizer's gradients, of a fragment's block, or of neither.

    >>> ExchangeKind.block(2).is_block, ExchangeKind.gradients(0).optimizer
    (True, 0)

    Attributes:
        code: as it is written in the packed header.
    """

    code: int

    @classmethod
    def gradients(cls, optimizer: int) -> ExchangeKind:
        """The gradients of optimizer 0, 1, ..."""
        return cls(1 + optimizer)

    @classmethod
    def block(cls, fragment: int) -> ExchangeKind:
        """The block of fragment 0, 1, ..."""
        return cls(BLOCK + fragment)

    @property
    def is_block(self) -> bool:
        """Whether it is the exchange of a block."""
        return self.code >= BLOCK

    @property
    def optimizer(self) -> int:
        """Whose gradients they are."""
        return self.code - 1


NO_PAYLOAD = ExchangeKind(0)
"""The worker brings nothing, and joins whatever the others exchange."""
WARMUP_END = ExchangeKind(-1)
"""The exchange without a payload that ends a warm-up."""

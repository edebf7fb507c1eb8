# SPDX-License-Identifier: Apache-2.0
"""What a worker did since the last exchange."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LocalWork:
    """What a worker did since the last exchange.

    Attributes:
        minibatches: steps of the optimizer.
        total: the same since attach.
        factor: weight of the contribution; 1 for a full one.
        leaving: whether the worker has no more work.
        merges: whether it ends the block early.
        stands: whether it only joins a block that another worker brings.
    """

    minibatches: int
    total: int
    factor: float = 1.0
    leaving: bool = False
    merges: bool = False
    stands: bool = False

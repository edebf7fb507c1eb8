# SPDX-License-Identifier: Apache-2.0
"""What the auto-checkpointer asks of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class ExchangePosition:
    """Where the exchanges of a run stand; the same on all workers between two exchanges.

    Attributes:
        count: exchanges begun, as `every_blocks` counts them.
        sequence: number of the last exchange of any kind.
        left: number of the exchange in which somebody first came with nothing more to bring; None where all are there.
        better_later: whether something is under way that will have come before the next exchange begins.
    """

    count: int
    sequence: int = 0
    left: int | None = None
    better_later: bool = False


class CheckpointSource(Protocol):
    """What is saved: the state of a run."""

    def exchange_position(self) -> ExchangePosition:
        """Where the exchanges stand."""

    def about(self) -> dict[str, Any]:
        """What the manifest says besides the sums; `minibatches` among it."""

    def kept(self) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        """This worker's state, and the global model where it is not the state's "model"; the tensors themselves."""

# SPDX-License-Identifier: Apache-2.0
"""What the auto-checkpointer needs from a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class ExchangePosition:
    """Position in the exchanges of a run; the same on all workers between two exchanges.

    Attributes:
        count: exchanges begun, as `every_blocks` counts them.
        sequence: number of the last exchange of any kind.
        left: number of the first exchange to which a worker contributed nothing more; None while all train.
        better_later: whether a pending result will have arrived before the next exchange begins.
        awaited: whether other workers are at the end of the pass already; they come to this place after it.
    """

    count: int
    sequence: int = 0
    left: int | None = None
    better_later: bool = False
    awaited: bool = False


class CheckpointSource(Protocol):
    """The state of a run, to save."""

    def exchange_position(self) -> ExchangePosition:
        """Position in the exchanges."""

    def about(self) -> dict[str, Any]:
        """The manifest's fields besides the sums, `minibatches` among them."""

    def kept(self) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        """This worker's state, and the global model if it is not the state's "model"; tensors are not copied."""

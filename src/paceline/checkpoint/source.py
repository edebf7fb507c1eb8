# SPDX-License-Identifier: Apache-2.0
"""What the auto-checkpointer needs from a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Kept:
    """What a step holds of a worker.

    Attributes:
        state: its own.
        model: the global model, name -> tensor.
        frozen: key -> (name, values) of the tensors that the state names; neither it nor the model has them.
    """

    state: dict[str, Any]
    model: dict[str, Tensor]
    frozen: dict[str, tuple[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointSource:
    """The state of a run, to save.

    Attributes:
        exchange_position: gives the position in the exchanges.
        about: gives the manifest's fields besides the sums, `minibatches` among them.
        kept: gives what a step holds of this worker; tensors are not copied.
    """

    exchange_position: Callable[[], ExchangePosition]
    about: Callable[[], dict[str, Any]]
    kept: Callable[[], Kept]

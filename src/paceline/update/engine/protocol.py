# SPDX-License-Identifier: Apache-2.0
"""What a run needs of whatever carries out its rule among several workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint import Moment
from paceline.checkpoint.reshard import OldCheckpoint
from paceline.core.flat import Fragment
from paceline.data.ledger.assignment import Leases
from paceline.rules.rule import Rule


class GlobalPart(Protocol):
    """A part of the global model: the user's tensors, and the global values for them."""

    @property
    def fragment(self) -> Fragment:
        """The tensors."""

    @property
    def anchor(self) -> Tensor:
        """The values, shape (numel,)."""

    @property
    def numel(self) -> int:
        """Elements."""


class GlobalModel(Protocol):
    """What knows the global model."""

    @property
    def global_parts(self) -> Sequence[GlobalPart]:
        """Its parts."""

    def global_tensors(self) -> dict[str, Tensor]:
        """Name -> parameter or buffer, in the model's own dtype and shape; copies."""


class EngineProtocol(Protocol):
    """What happens at the steps of a run of several workers.

    Attributes:
        local: whether gradients are to stay on this worker for the moment.
    """

    local: bool

    @property
    def hooks_gradients(self) -> bool:
        """Whether something is due before an optimizer's step."""

    @property
    def gradients_due(self) -> bool:
        """Whether gradients are exchanged before the next step."""

    @property
    def exchanged(self) -> int:
        """Exchanges so far, as the user counts them."""

    @property
    def steps_committed(self) -> int:
        """Minibatches of this worker whose work is in the global model: the first so many."""

    @property
    def moment(self) -> Moment | None:
        """Where the exchanges stand; None under rules by which workers never stand alike."""

    @property
    def leases(self) -> Leases | None:
        """The way to the ledger of the data, under rules by which workers go on unevenly."""

    @property
    def global_model(self) -> GlobalModel | None:
        """What knows the global model, where the user's differs from it."""

    @property
    def keeps_steps(self) -> bool:
        """Whether this worker writes, or takes part in writing, the steps that are due; else others do."""

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer made a step, or skipped it."""

    def on_step(self, warm: bool) -> None:
        """A minibatch was counted; `warm` where a warm-up is over with it."""

    def follow(self, rule: Rule) -> None:
        """Go on with other numbers of the rule."""

    def merge(self) -> None:
        """Bring what every worker has done so far into the global model; all call it at the same place."""

    def shutdown(self) -> None:
        """Come to the end together."""

    def close(self) -> None:
        """Let everything go."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""

    def reshard(self, old: OldCheckpoint) -> Callable[[], None]:
        """Read and check what another number of workers saved; what is returned puts it in its place, after the
        model's, the optimizers' and the flow's own."""

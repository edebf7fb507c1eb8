# SPDX-License-Identifier: Apache-2.0
"""The engine protocol: the interface by which a run carries out its rule among several workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint import ExchangePosition
from paceline.checkpoint.reshard import OldCheckpoint
from paceline.core.flat import Fragment
from paceline.data.ledger.epoch_ledger import Leases
from paceline.rules.rule import Rule


class GlobalPart(Protocol):
    """A part of the global model: the user's tensors, and the global values for them."""

    @property
    def fragment(self) -> Fragment:
        """The tensors."""

    @property
    def exported(self) -> Tensor:
        """The values, shape (numel,)."""


class GlobalModel(Protocol):
    """Gives the global model."""

    @property
    def global_parts(self) -> Sequence[GlobalPart]:
        """Its parts."""


class EngineProtocol(Protocol):
    """Carries out a rule at the steps of a run of several workers."""

    @property
    def local(self) -> bool:
        """Whether gradients stay on this worker at present."""

    def keep_local(self, now: bool) -> None:
        """Whether gradients stay on this worker from now on; without effect where none are exchanged."""

    @property
    def gradients_due(self) -> bool:
        """Whether gradients are exchanged before the next step."""

    @property
    def exchanged(self) -> int:
        """Exchanges so far, as the user counts them."""

    @property
    def steps_committed(self) -> int:
        """How many of this worker's minibatches, from the first, are in the global model."""

    @property
    def exchange_position(self) -> ExchangePosition | None:
        """Position in the exchanges; None under asynchronous rules, which have no common one."""

    @property
    def leases(self) -> Leases | None:
        """The client of the data ledger, under rules by which workers proceed unevenly; else None."""

    @property
    def global_model(self) -> GlobalModel | None:
        """Gives the global model; None if the user's model holds it."""

    @property
    def keeps_steps(self) -> bool:
        """Whether this worker writes, or helps to write, checkpoint steps that are due."""

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer made a step, or skipped it."""

    def on_step(self, warm: bool) -> None:
        """A minibatch was counted; `warm` if it ended the warm-up."""

    def take_written(self) -> list[Fragment]:
        """The parameters that exchanges of blocks have written since the last call."""

    def retune(self) -> None:
        """Where workers exchange together: agree on the requested changes of settings, and apply them at once; all
        workers call it at the same place."""

    def follow(self, rule: Rule) -> None:
        """Continue with changed settings of the rule."""

    def retuned(self, rule: Rule) -> None:
        """Continue with numbers of the rule that were tuned and wait for no exchange."""

    def merge(self) -> None:
        """Merge every worker's work so far into the global model; all workers call it at the same place."""

    def shutdown(self) -> None:
        """End the run together with all workers."""

    def close(self) -> None:
        """Release all resources."""

    def state(self) -> dict[str, Any]:
        """The engine's state for a checkpoint."""

    def load(self, state: dict[str, Any]) -> None:
        """Load a result of `state`."""

    def reshard(self, old: OldCheckpoint) -> Callable[[], None]:
        """Read and check a checkpoint of another number of workers; returns a function that loads it; call
        that after model, optimizers and step counts are loaded."""

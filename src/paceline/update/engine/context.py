# SPDX-License-Identifier: Apache-2.0
"""The context that the parts of a run share: one frozen record, built in :mod:`paceline.run.assembly`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from paceline.communication import Transport
from paceline.core.flat import Modules, module_list
from paceline.core.optimizer_state import Owned
from paceline.data.sharing.loader_registry import LoaderRegistry
from paceline.errors import UnsupportedError
from paceline.extensions import Observer
from paceline.rules.rule import Rule
from paceline.rules.schedule import Schedule
from paceline.tuning.tuner import Tuner
from paceline.update.engine.settings import Settings
from paceline.update.monitor import Monitor


def skipped(optimizer: Optimizer) -> bool:
    """Whether the last step did nothing: fused optimizers skip inside, and report it in `found_inf`."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item() if hasattr(found, "item") else found)


class TrainingProgress:
    """Counts one worker's steps.

    Attributes:
        lockstep: whether gradients are exchanged before the next step: always, or during the warm-up.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.restore(0, False)

    def end_warmup(self) -> None:
        """The warm-up is over; a worker that left during it learns this from its peers."""
        self.restore(self.steps, True)

    def follow_schedule(self, schedule: Schedule, blocks: bool) -> None:
        """Continue under another schedule; `blocks`: whether it has blocks now."""
        self.schedule = schedule
        self.restore(self.steps, self.warm and blocks)

    def restore(self, steps: int, warm: bool) -> None:
        """Continue from a checkpoint."""
        self.steps, self.warm, self.lockstep = steps, warm, self.schedule.is_lockstep(warm)

    @property
    def exchanges(self) -> int:
        """Exchanges that a single worker would have made by now."""
        return self.schedule.exchanges_after(self.steps)

    def follow(self, steps: int) -> None:
        """Continue after `steps` steps, as the other workers do."""
        self.steps = steps

    def stepped(self) -> bool:
        """Count a step; returns whether it ends the warm-up (`warm` is set once all workers have the same start)."""
        self.steps += 1
        return self.lockstep and self.schedule.ends_warmup(self.steps)


@dataclass(frozen=True)
class RunContext:
    """The parts below an engine.

    Attributes:
        settings: of the run.
        model: the user's modules.
        transport: the connection to the other workers.
        progress: counts this worker's steps.
        monitor: times the run and writes its event log.
        loaders: the data that the run shares among the workers.
        tuner: changes settings during the run.
        observers: of the run, such as the one that writes receipts.
    """

    settings: Settings
    model: Modules
    owned: Owned
    transport: Transport
    progress: TrainingProgress
    monitor: Monitor
    loaders: LoaderRegistry
    tuner: Tuner
    observers: Sequence[Observer] = ()

    @property
    def trains(self) -> bool:
        """Whether the program trains, judged by gradients and by the mode of its model."""
        modules = [module for _, module in module_list(self.model)]
        return torch.is_grad_enabled() and any(one.training for module in modules for one in module.modules())

    def check_unchanged(self, optimizer: Optimizer) -> None:
        """Refuse parameters that were added to the optimizer that steps, or removed from it, after attach.

        Those of others may be frozen meanwhile: a generator steps while its critic is.
        """
        known = {id(parameter) for _, parameter in next(named for one, named in self.owned if one is optimizer)}
        now = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if now != known:
            raise UnsupportedError(
                f"{type(optimizer).__name__} had {len(known)} trainable parameters at attach and has {len(now)} now "
                f"({len(now - known)} new, {len(known - now)} gone or frozen); after such a change close the run "
                "and attach again; a program that does not attach itself has to make a new optimizer then"
            )

    @property
    def rule(self) -> Rule:
        """The rule, with its present numbers."""
        return self.tuner.rule

# SPDX-License-Identifier: Apache-2.0
"""The context that the parts of a run share: one frozen record, built in :mod:`paceline.run.assembly`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.communication import Transport
from paceline.core.flat import Modules, module_list
from paceline.core.optimizer_state import Owned
from paceline.data.sharing.loader_registry import LoaderRegistry
from paceline.extensions import Observer
from paceline.rules.rule import Rule
from paceline.tuning.tuner import Tuner
from paceline.update.engine.settings import Settings
from paceline.update.monitor import Monitor, TrainingProgress


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

    @property
    def rule(self) -> Rule:
        return self.tuner.rule

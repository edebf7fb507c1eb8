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
    """The parts below an engine."""

    settings: Settings  # of the run
    model: Modules  # the user's modules
    owned: Owned
    transport: Transport  # the connection to the other workers
    progress: TrainingProgress  # counts this worker's steps
    monitor: Monitor  # times the run and writes its event log
    loaders: LoaderRegistry  # the data that the run shares among the workers
    tuner: Tuner  # changes settings during the run
    observers: Sequence[Observer] = ()  # of the run, such as the one that writes receipts

    @property
    def trains(self) -> bool:
        """Whether the program trains, judged by gradients and by the mode of its model."""
        modules = [module for _, module in module_list(self.model)]
        return torch.is_grad_enabled() and any(one.training for module in modules for one in module.modules())

    @property
    def rule(self) -> Rule:
        return self.tuner.rule

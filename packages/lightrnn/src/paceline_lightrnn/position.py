# SPDX-License-Identifier: Apache-2.0
"""The position of a training: what its checkpoints hold besides weights, optimizer and data."""

from __future__ import annotations

from typing import Any

from paceline_lightrnn.language import LanguageModel
from paceline_lightrnn.model import LightRNN
from paceline_lightrnn.rounds import Costs, new_costs


class Position:
    """Round, table and measurements, with the methods that a checkpoint needs.

    Args:
        model: the model, whose table is saved and restored.
        workers: number of workers.

    Attributes:
        round: the current or next one, from 0.
        trained: whether its training is over and only its re-allocation is left.
        words: that this worker has read in it.
        seconds: training time of this worker in it.
        row: its measurements.
        history: the rows of all finished rounds.
        costs: gathered in training, if any.
        costs_lost: another number of workers resumed, so that costs gathered in training are incomplete.
        costs_sum: checksum of the file with the costs of all workers, on worker 0.
        saves: number of saved states.
    """

    def __init__(self, model: LanguageModel, workers: int = 1) -> None:
        self._model = model if isinstance(model, LightRNN) else None
        self.workers, self.costs_lost = workers, False
        self.round, self.trained = 0, False
        self.words, self.seconds = 0, 0.0
        self.row: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.costs: Costs | None = None
        self.costs_sum = ""
        self.saves = 0

    def end_round(self) -> None:
        """The round is over."""
        self.history.append(self.row)
        self.round, self.trained = self.round + 1, False
        self.words, self.seconds, self.row, self.costs, self.costs_sum = 0, 0.0, {}, None, ""
        self.costs_lost = False

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        plain = ("round", "trained", "words", "seconds", "row", "history", "costs_sum", "saves")
        return {
            **{name: getattr(self, name) for name in plain},
            "workers": self.workers,
            "cells": self._model.table.cells.cpu() if self._model is not None else None,
            "costs": list(self.costs.tensors()) if self.costs is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        for name, value in state.items():
            if name not in ("cells", "costs", "workers"):
                setattr(self, name, value)
        if self._model is not None and state["cells"] is not None:
            self._model.table = self._model.table.with_cells(state["cells"])
        self.costs = None
        if state["workers"] != self.workers:
            self.words = self.words * state["workers"] // self.workers
            self.costs_lost = state["costs"] is not None
        elif self._model is not None and state["costs"] is not None:
            self.costs = new_costs(self._model)
            for tensor, value in zip(self.costs.tensors(), state["costs"], strict=True):
                tensor.copy_(value)

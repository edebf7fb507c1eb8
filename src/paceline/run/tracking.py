# SPDX-License-Identifier: Apache-2.0
"""`paceline run --tensorboard`, `--wandb` and `--metrics`: trackers for programs that name none."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.lazy import needed
from paceline.observe.sinks.base import Values, as_sink
from paceline.run.run import Run

TENSORBOARD, WANDB, METRICS = "PACELINE_TENSORBOARD", "PACELINE_WANDB", "PACELINE_METRICS"
"""Variables: a directory; a project; HOST:PORT of the first worker of each host."""


class OpenedSink:
    """A tracker that is opened by the worker that writes, at its first values, and closed with the run.

    In an elastic run that is rank 0 at the time, which may leave.

    Args:
        begin: opens the tracker.
        end: closes it.
    """

    def __init__(self, begin: Callable[[], Any], end: Callable[[Any], object]) -> None:
        self._begin, self._end = begin, end
        self._tracker: Any = None

    def open(self) -> None:
        """Open it now, so that what is wrong with it is told before the training."""
        if self._tracker is None:
            self._tracker = self._begin()
            self._sink = as_sink(self._tracker)

    def log(self, values: Values, step: int) -> None:
        """Write values."""
        self.open()
        self._sink.log(values, step)

    def close(self) -> None:
        """Close what was opened."""
        if self._tracker is not None:
            self._sink.close()
            self._end(self._tracker)


def track(run: Run, environment: Mapping[str, str] = os.environ) -> None:
    """Add the trackers that the environment names.

    Raises:
        MissingExtraError: their package is not installed.
        UnsupportedError: the address of the metrics cannot be used.
    """
    sinks = []
    if directory := environment.get(TENSORBOARD):
        sinks.append(OpenedSink(lambda: _tensorboard(directory), lambda writer: writer.close()))
    if project := environment.get(WANDB):
        sinks.append(OpenedSink(lambda: _wandb(project), lambda tracker: tracker.finish()))
    for sink in sinks:
        if run.is_main:
            sink.open()
        run.log_to(sink)
    if address := environment.get(METRICS):
        run.serve_metrics(address)


def _tensorboard(directory: str) -> Any:
    with needed("--tensorboard", "tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(directory)


def _wandb(project: str) -> Any:
    with needed("--wandb", "wandb"):
        wandb = importlib.import_module("wandb")
    return wandb.init(project=project)

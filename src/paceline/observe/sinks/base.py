# SPDX-License-Identifier: Apache-2.0
"""A sink takes metrics by name, at a minibatch."""

from __future__ import annotations

from typing import Any, Protocol

from paceline.errors import UnsupportedError

Values = dict[str, float]

PREFIX = "paceline/"
"""Of the names of a run's own metrics."""


class Sink(Protocol):
    """The target of `run.log_to`; both methods are called in one thread, which is not the training thread."""

    def log(self, values: Values, step: int) -> None:
        """Take values after `step` minibatches of this worker; steps never fall, but may repeat."""

    def close(self) -> None:
        """The run has ended."""


def as_sink(target: Any) -> Sink:
    """A sink that writes to `target`; `UnsupportedError` where its methods are not known.

    A tracker that the user began (a SummaryWriter, a run of W&B, trackio or MLflow) stays open for the user at the end
    of the run; a sink of the user's own is closed.
    """
    if callable(getattr(target, "add_scalar", None)):
        return _ScalarWriter(target)
    if callable(getattr(target, "log_metrics", None)):
        return _MetricLogger(target)
    if callable(getattr(target, "log", None)):
        return _UserSink(target)
    raise UnsupportedError(
        f"a sink has log(values, step), and {type(target).__name__} has none of log, log_metrics and add_scalar; pass "
        "a SummaryWriter, what wandb.init() or trackio.init() gave, the module mlflow, or an object of your own"
    )


class _ScalarWriter:
    """TensorBoard: torch.utils.tensorboard.SummaryWriter, tensorboardX."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: Values, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.flush()


class _MetricLogger:
    """The module mlflow, and other objects with `log_metrics(values, step=...)`."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        self._run: dict[str, str] = {}
        if callable(getattr(tracker, "active_run", None)):  # MLflow has an active run a thread
            active = tracker.active_run()
            if active is None:
                raise UnsupportedError(
                    "MLflow has no active run here; call mlflow.start_run() before run.log_to(mlflow)"
                )
            self._run = {"run_id": active.info.run_id}

    def log(self, values: Values, step: int) -> None:
        self._tracker.log_metrics(values, step=step, **self._run)

    def close(self) -> None:
        pass


class _UserSink:
    """An object with `log(values, step)`: W&B, trackio, and sinks of the user's own."""

    def __init__(self, sink: Any) -> None:
        self.log, self.close = sink.log, getattr(sink, "close", lambda: None)

# SPDX-License-Identifier: Apache-2.0
"""A sink takes numbers by name, at a minibatch."""

from __future__ import annotations

from typing import Any, Protocol

from paceline.errors import UnsupportedError

Values = dict[str, float]

PREFIX = "paceline/"
"""Of the names of a run's own numbers."""


class Sink(Protocol):
    """What `run.log_to` writes to; both methods are called by one thread, which is not the one that trains.

    >>> from paceline.observe.sinks.base import as_sink
    >>> class Lines:
    ...     def log(self, values: dict[str, float], step: int) -> None:
    ...         print(step, values)
    >>> as_sink(Lines()).log({"loss": 0.5}, step=3)
    3 {'loss': 0.5}
    """

    def log(self, values: Values, step: int) -> None:
        """Take values as they are after `step` minibatches of this worker; steps never fall, but may repeat."""

    def close(self) -> None:
        """The run is over."""


def as_sink(thing: Any) -> Sink:
    """What writes to `thing`; `UnsupportedError` where nobody knows how.

    A tracker that the user began (a SummaryWriter, a run of W&B, trackio or MLflow) stays open for the user at the end
    of the run; a sink of the user's own is closed.
    """
    if callable(getattr(thing, "add_scalar", None)):
        return _Scalars(thing)
    if callable(getattr(thing, "log_metrics", None)):
        return _Metrics(thing)
    if callable(getattr(thing, "log", None)):
        return _Plain(thing)
    raise UnsupportedError(
        f"a sink has log(values, step), and {type(thing).__name__} has none of log, log_metrics and add_scalar; pass a "
        "SummaryWriter, what wandb.init() or trackio.init() gave, the module mlflow, or an object of your own"
    )


class _Scalars:
    """TensorBoard's writers: torch.utils.tensorboard.SummaryWriter, tensorboardX."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: Values, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.flush()


class _Metrics:
    """MLflow's module, and whatever else has `log_metrics(values, step=...)`."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        self._which: dict[str, str] = {}
        if callable(getattr(tracker, "active_run", None)):  # MLflow's active run is that of a thread, not of all
            active = tracker.active_run()
            if active is None:
                raise UnsupportedError(
                    "MLflow has no active run here; call mlflow.start_run() before run.log_to(mlflow)"
                )
            self._which = {"run_id": active.info.run_id}

    def log(self, values: Values, step: int) -> None:
        self._tracker.log_metrics(values, step=step, **self._which)

    def close(self) -> None:
        pass


class _Plain:
    """What has `log(values, step)` as a sink has: W&B, trackio, and sinks of the user's own."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def log(self, values: Values, step: int) -> None:
        self._tracker.log(values, step)

    def close(self) -> None:
        close = getattr(self._tracker, "close", None)
        if callable(close):
            close()

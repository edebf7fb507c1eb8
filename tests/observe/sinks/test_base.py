# SPDX-License-Identifier: Apache-2.0
"""Real trackers get what a run says, and keep it: TensorBoard's files, the local stores of the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from tests.observe.sinks.test_metrics import made, train

LOSSES, OWN, STEPS = "loss", "paceline/minibatches", 4

pytestmark = [
    pytest.mark.usefixtures("_often"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.update.monitor.FOLD_S", 0.0)


def trained(sink: Any) -> None:
    """A run of four steps whose values and numbers go to `sink`."""
    model, optimizer = made()
    with paceline.attach(model, optimizer) as run:
        run.log_to(sink, every_s=0.0)
        train(run, model, optimizer, STEPS)


def imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the package itself imports
        return pytest.importorskip(name)


@pytest.fixture
def no_complaint(caplog: pytest.LogCaptureFixture) -> Callable[[], None]:
    def check() -> None:
        assert [record.message for record in caplog.records if record.name == "paceline"] == []

    return check


def test_tensorboard(tmp_path: Path, no_complaint: Callable[[], None]) -> None:
    imported("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    trained(writer)
    events = EventAccumulator(str(tmp_path))  # what was flushed is there before the writer is closed
    events.Reload()
    assert [event.step for event in events.Scalars(LOSSES)] == [1, 2, 3, 4]
    assert [(event.step, event.value) for event in events.Scalars(OWN)][:3] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    writer.close()
    no_complaint()


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_complaint: Callable[[], None]) -> None:
    wandb = imported("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="paceline")
    trained(run)
    # a row is in the summary when the next one begins
    assert (run.summary[LOSSES] < 1e3, run.summary[OWN], run.step) == (True, STEPS - 1, STEPS)
    run.finish()
    assert list(tmp_path.rglob("*.wandb"))
    no_complaint()


def test_mlflow_in_a_local_store(tmp_path: Path, no_complaint: Callable[[], None]) -> None:
    mlflow = imported("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(paceline.UnsupportedError, match="no active run"):
        trained(mlflow)
    with mlflow.start_run() as active:
        trained(mlflow)
    client = mlflow.MlflowClient()
    assert [one.step for one in client.get_metric_history(active.info.run_id, LOSSES)] == [1, 2, 3, 4]
    own = [(one.step, one.value) for one in client.get_metric_history(active.info.run_id, OWN)]
    assert own[:3] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    no_complaint()


def test_trackio_in_a_local_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_complaint: Callable[[], None]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = imported("trackio")
    trackio.init(project="paceline", name="one")
    trained(trackio)  # the module: its run is known to this context alone, and reaches the thread
    trackio.finish()
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("paceline", "one")
    assert [row["step"] for row in rows if LOSSES in row] == [1, 2, 3, 4]
    assert [row[OWN] for row in rows if OWN in row][:3] == [1, 2, 3]
    no_complaint()

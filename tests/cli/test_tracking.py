# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811
"""`--tensorboard`, `--wandb`, `--metrics` and `--checkpoint`: for programs that name none, also unchanged ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch

import paceline
from paceline.cli.run.options import TrackingOptions
from paceline.run.attach import METRICS, TENSORBOARD, WANDB
from tests.cli.test_run import Script, _here, run, script  # noqa: F401

BARE = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x = torch.randn(440, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=True)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for a, b in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
"""


def attached() -> paceline.Run:
    model = torch.nn.Linear(8, 1)
    return paceline.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "averaging(period=1)")


def tags(directory: Path) -> set[str]:
    """What TensorBoard finds."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(directory))
    found.Reload()
    names: set[str] = set(found.Tags()["scalars"])
    return names


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.full
def test_an_unchanged_program_is_tracked_and_writes_steps(script: Script, tmp_path: Path) -> None:
    """Also worker 1's part of a step, whose other files go elsewhere."""
    pytest.importorskip("tensorboard")
    path = script(BARE)
    options = ("--workers", 2, "--rule", "averaging(period=1)", "--log", "log", "--overwrite")
    result = run(*options, "--tensorboard", "board", "--checkpoint", "steps", path)
    assert result.exit_code == 0 and "could not be written" not in result.output, result.output
    assert len(list(Path("board").iterdir())) == 1 and "paceline/minibatches" in tags(Path("board"))
    steps = sorted(path.name for path in Path("steps").glob("step-*"))
    assert steps and all((Path("steps") / step / "manifest.json").exists() for step in steps)
    assert {"global.safetensors", "rank-000.json", "rank-001.json"} <= {
        path.name for path in (Path("steps") / steps[-1]).iterdir()
    }
    again = run(*options, "--checkpoint", "steps", path)
    assert again.exit_code == 2 and "cannot go on from it" in " ".join(again.stderr.replace("│", " ").split())


@pytest.mark.plugins
def test_what_cannot_work_is_refused_before_the_start(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(BARE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def refused(*options: object) -> str:
        result = run("--workers", 2, *options, path)
        assert result.exit_code == 2, result.output
        return " ".join(result.stderr.replace("│", " ").split())

    assert "--wandb needs wandb, which is not installed: pip install 'paceline[wandb]'" in refused("--wandb", "project")
    assert "paceline[tensorboard]" in refused("--tensorboard", "board")
    assert "prometheus_client" in refused("--metrics", 9400)


def test_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = TrackingOptions("board", "project", "9400", "s3://bucket/run").environment()
    assert found == {
        TENSORBOARD: str(tmp_path / "board"),
        WANDB: "project",
        METRICS: "127.0.0.1:9400",
        "PACELINE_CHECKPOINT": "s3://bucket/run",
    }
    assert TrackingOptions(checkpoint="a").environment() == {"PACELINE_CHECKPOINT": str(tmp_path / "a")}


def test_one_worker_writes_and_each_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv(TENSORBOARD, str(tmp_path))
    monkeypatch.setenv(METRICS, "127.0.0.1:0")
    served: list[str] = []

    def work() -> None:
        with attached() as run:
            run.log(loss=0.5)
            served.extend(one.address for one in run._parts.sinks._closing if hasattr(one, "address"))
            if run.is_main:
                text = urlopen(f"http://{served[0]}/metrics", timeout=10).read().decode()
                assert "paceline_minibatches_total" in text

    paceline.simulate(work, 2)
    assert len(set(served)) == 2 and len(list(tmp_path.iterdir())) == 1 and "loss" in tags(tmp_path)

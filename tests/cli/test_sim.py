# SPDX-License-Identifier: Apache-2.0
"""`paceline sim`: the command around the simulation, and the bits of real processes."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.forecast.sim import program
from tests.paths import python_path

pytestmark = pytest.mark.plugins

TRAIN = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(36, 3), torch.randn(36, 1))
    with paceline.attach(model, optimizer) as run:
        for x, y in run.share(DataLoader(data, batch_size=2, shuffle=True)):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            run.log(loss=loss.item())
    torch.save(model.state_dict(), f"{sys.argv[1]}-{run.world.rank}.pt")
    print("rank", run.world.rank, "of", run.world.size, "made", run.minibatches)
"""
FOREVER = """
    import os, time
    with open("new-pid", "w") as file:
        file.write(str(os.getpid()))
    os.rename("new-pid", "pid")
    time.sleep(300)
"""

MINE = """
from paceline.rules import Delta, EveryBlock, Ordered, Rule
def rule(period=4):
    return Rule(EveryBlock(period), Delta(), topology=Ordered())
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PACELINE_RULE", "PACELINE_LOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", python_path())
    Path("train.py").write_text(textwrap.dedent(TRAIN))
    Path("forever.py").write_text(textwrap.dedent(FOREVER))


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.claim
@pytest.mark.processes
def test_a_script_runs_and_its_logs_make_a_report() -> None:
    result = invoke("sim", "--workers", 3, "--rule", "bmuf(period=2)", "--log", "log", "train.py", "a")
    assert result.exit_code == 0, result.output
    assert "[0] rank 0 of 3 made 6" in result.stdout.splitlines()
    assert "3 virtual workers finished" in result.stderr and "paceline report log" in result.stderr
    assert Path("log/output/rank-002.out").read_text() == "rank 2 of 3 made 6\n"
    assert sorted(path.name for path in Path("log").glob("*.jsonl")) == [f"rank-00{k}.jsonl" for k in range(3)]
    report = invoke("report", "log", "--output", "page")
    assert report.exit_code == 0 and Path("page/index.html").is_file(), report.output


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", ["bmuf(period=2, reproducible=True)", "sync(reproducible=True)", "mine:rule(period=2)"]
)
def test_the_bits_are_those_of_real_processes(rule: str) -> None:
    Path("mine.py").write_text(MINE)
    for command in ("sim", "run"):
        result = invoke(command, "--workers", 3, "--rule", rule, "--log", command, "train.py", command)
        assert result.exit_code == 0, result.output
    for rank in range(3):
        virtual, real = (torch.load(f"{command}-{rank}.pt", weights_only=True) for command in ("sim", "run"))
        assert all(torch.equal(virtual[name], real[name]) for name in real)


def test_the_panel_names_the_worker_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process itself is played: it leaves what `paceline.forecast.sim.program` leaves."""
    from paceline.cli import sim
    from paceline.cli.launch.launch import Outcome

    def process(size: tuple[int, int], what: list[str], rule: str | None, log: Path, quiet: bool) -> Outcome:
        (log / "output").mkdir()
        (log / "output" / "rank-007.err").write_text("Traceback (most recent call last):\n  x\nKeyError: 'odd'\n")
        (log / "output" / program.FAILED).write_text("7\n")
        return Outcome(codes={0: 1})

    monkeypatch.setattr(sim, "_run", process)
    result = invoke("sim", "--workers", 64, "train.py")
    assert result.exit_code == 1
    assert "worker 7 on" in result.stderr and "KeyError: 'odd'" in result.stderr and "the other 63" in result.stderr


def test_a_crash_of_the_whole_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.cli import sim
    from paceline.cli.launch.launch import Outcome

    def process(size: tuple[int, int], what: list[str], rule: str | None, log: Path, quiet: bool) -> Outcome:
        (log / "output").mkdir()
        (log / "output" / "rank-000.err").write_text("")
        return Outcome(codes={0: -9})

    monkeypatch.setattr(sim, "_run", process)
    result = invoke("sim", "train.py")
    assert result.exit_code == 128 + 9
    assert "the simulation failed" in result.stderr and "SIGKILL" in result.stderr

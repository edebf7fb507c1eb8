# SPDX-License-Identifier: Apache-2.0
"""`paceline verify --block`: a block is made again, and silent corruption is found with its worker."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import paceline
from paceline.cli import app
from tests.observe.receipts.written import Line, forge
from tests.paths import python_path

TRAIN = """
    import os, sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    torch.manual_seed(int(os.environ.get("START", "0")))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    made = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 8, generator=made), torch.randn(96, 1, generator=made))
    kept = {"checkpoint": "steps", "every_blocks": 1, "keep": 100} if "keep" in sys.argv else {}
    passes = 1 if "short" in sys.argv else 2
    if "fail" in sys.argv:
        raise ValueError("the data are gone")
    with paceline.attach(model, optimizer, **kept) as run:
        if kept:
            run.resume()
        for _ in range(run.epoch, passes):
            for x, y in run.share(DataLoader(data, 4, shuffle=True)):
                if os.environ.get("FLIP") == f"{run.world.rank} {run.minibatches}":
                    model[0].weight.data.view(torch.int32)[3, 3] ^= 1  # the least bit of one number
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
"""
ZERO = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
    for x, y in DataLoader(data, 4, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""
EXACT = "bmuf(period=4, reproducible=True)"
MERGES = [1, 2, 4, 5]
"""Numbers of the exchanges of blocks, two in each pass; at exchange 3 all workers meet at the end of the first one."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PACELINE_LOG", "FLIP", "START"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("PYTHONPATH", python_path())
    Path("train.py").write_text(textwrap.dedent(TRAIN))
    Path("zero.py").write_text(textwrap.dedent(ZERO))


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def simulated(monkeypatch: pytest.MonkeyPatch, rule: str = EXACT, *arguments: str) -> None:
    """A run of three virtual workers, whose receipts nobody seals."""
    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_RECEIPTS", str(Path("run").resolve()))
        patch.setenv("PACELINE_RULE", rule)
        paceline.simulate("train.py", 3, arguments)


def again(block: int, *arguments: str) -> Result:
    return invoke("verify", "run", "--block", block, "train.py", *arguments)


@pytest.mark.slow  # tests/doors/zero/test_run.py compares the models
@pytest.mark.processes
@pytest.mark.full
def test_real_processes_and_virtual_workers_make_the_same_blocks() -> None:
    said = invoke("run", "--workers", 3, "--receipts", "--log", "run", "--rule", EXACT, "train.py", "keep")
    assert said.exit_code == 0, said.output
    said = again(5, "keep")
    assert said.exit_code == 0, said.output
    found = re.search(r"right: exchanges (\d) to 5, made again from checkpoint step-0000000(\d\d): the", said.output)
    assert found is not None and 4 * MERGES.index(int(found[1])) == int(found[2]), said.output
    shutil.rmtree("steps")
    said = again(4, "keep")
    assert said.exit_code == 0, said.output
    assert "right: exchanges 1 to 4, made again from the beginning: the same bits" in said.output
    assert not Path("steps").exists()  # a run that is made again keeps its steps elsewhere


@pytest.mark.processes
@pytest.mark.full
def test_an_unchanged_program_is_made_again() -> None:
    said = invoke("run", "--workers", 2, "--receipts", "--log", "run", "--rule", "bmuf_adam(period=4)", "zero.py")
    assert said.exit_code == 0, said.output
    said = invoke("verify", "run", "--block", 2, "zero.py")
    assert said.exit_code == 0, said.output
    assert "right: exchanges 1 to 2, made again from the beginning: the same bits" in said.output


@pytest.mark.slow  # tests/observe/receipts has the chain of a resume
@pytest.mark.processes
@pytest.mark.full
def test_a_worker_that_is_killed_and_comes_back_leaves_one_whole_chain() -> None:
    """Each sample is in one receipt, also those of the block that the kill took back."""
    Path("once.py").write_text(
        textwrap.dedent(TRAIN)
        .replace("import os, sys", "import glob, os, sys, time")
        .replace("        for x, y in", "        first = not os.path.exists('killed')\n        for x, y in")
        .replace(
            "            optimizer.zero_grad()",
            "            if first and run.world.rank == 1 and run.minibatches == 14:\n"
            "                over = time.monotonic() + 60  # for a step to go on from\n"
            "                while not glob.glob('steps/step-' + 9 * '?') and time.monotonic() < over:\n"
            "                    time.sleep(0.01)\n"
            "                open('killed', 'w').close()\n"
            "                os._exit(9)\n"
            "            optimizer.zero_grad()",
        )
    )
    said = invoke(
        *("run", "--workers", 2, "--restarts", 1, "--receipts", "--log", "run", "--rule", EXACT, "once.py", "keep")
    )
    assert said.exit_code == 0 and Path("killed").exists(), said.output
    chain = Path("run/receipts/rank-001.jsonl").read_text()
    assert chain.count('"kind":"start"') == 2 and chain.count('"kind":"resume"') == 1
    said = invoke("verify", "run")
    assert said.exit_code == 0 and said.output.count("96 places of 96 places, each exactly once") == 2, said.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--workers", "1"], "--receipts: one worker merges nothing; give --workers 2 or more"),
        (["--elastic", "1:2"], "--receipts is for runs of a fixed size"),
    ],
)
def test_runs_that_cannot_have_receipts_are_refused(options: list[str], says: str) -> None:
    said = invoke("run", "--receipts", *options, "train.py")
    assert said.exit_code == 2 and says in " ".join(said.output.replace("│", "").split()), said.output


def other_given(lines: list[Line]) -> None:
    next(line for line in lines if line.get("n") == 2)["given"] = "0" * 64


def other_model(lines: list[Line]) -> None:
    next(line for line in lines if line.get("n") == 2)["model"] = "0" * 64


def other_processor(lines: list[Line]) -> None:
    lines[0]["machine"]["cpu"] = "another one"


@pytest.mark.slow  # tests/observe/receipts has each of its sentences
@pytest.mark.processes
@pytest.mark.full
def test_what_a_recomputation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run, changed in turn as if something had happened in it."""
    simulated(monkeypatch)
    shutil.copytree("run", "kept")

    def changed(code: int, says: str, *changes: tuple[int, object], arguments: tuple[str, ...] = ()) -> str:
        shutil.rmtree("run")
        shutil.copytree("kept", "run")
        for rank, change in changes:
            forge(Path("run"), rank, change)  # type: ignore[arg-type]
        said = again(4, *arguments)
        assert said.exit_code == code and says in said.output, said.output
        return said.output

    changed(1, "exchange 2, made again from the beginning: worker 2 brought something else", (2, other_given))
    everyone = [(rank, other_model) for rank in range(3)]
    changed(1, "all workers hold another model after it than the same samples give", *everyone)
    elsewhere = [(rank, other_processor) for rank in range(3)]
    rounded = "which need not mean anything, since sums may be rounded"
    said = changed(2, rounded, (2, other_given), *elsewhere)
    assert "(processor: another one then," in said
    changed(2, "right: exchanges 1 to 4", *elsewhere)  # nobody has sealed it; the same bits are the same bits
    changed(2, "the program could not be run again: ValueError: the data are gone", arguments=("fail",))
    monkeypatch.setenv("START", "5")
    changed(2, "the program begins with another model than the run did")
    monkeypatch.delenv("START")


@pytest.mark.slow  # the same
@pytest.mark.processes
@pytest.mark.full
def test_what_cannot_be_recomputed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(monkeypatch, "averaging(period=4)")
    assert "right: exchanges 1 to 2, made again from the beginning: the same bits" in again(2).output  # as it happens
    forge(Path("run"), 1, other_given)
    said = again(2)
    assert said.exit_code == 2 and "(the order of sums of averaging(period=4) follows the route" in said.output
    shutil.rmtree("run")
    simulated(monkeypatch, EXACT, "keep")
    said = again(4, "short")
    assert said.exit_code == 2 and "the program ended after exchange 2, before exchange 4" in said.output, said.output
    shutil.move("run", "first")
    shutil.rmtree("steps")
    with monkeypatch.context() as patch:
        patch.setenv("START", "5")
        simulated(monkeypatch, EXACT, "keep")  # the steps of another run
    shutil.rmtree("run")
    shutil.move("first", "run")
    said = again(4, "keep")
    assert said.exit_code == 1, said.output
    assert re.search(r"wrong: checkpoint step-\d+ does not hold the state after exchange \d", said.output), said.output

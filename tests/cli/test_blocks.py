# SPDX-License-Identifier: Apache-2.0
"""`paceline blocks`: what is refused before anything starts, and real workers that are killed and go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import paceline
from paceline.cli import app
from paceline_plugins.files.plan import Plan
from paceline_plugins.files.worker import train
from tests.doors.files.plans import MOMENTUM, TOOL

DEADLINE_S = 150.0
PLACES = ("{model}", "{model_out}", "{part}", "{lr}")
MODEL = b"   x" + bytes(8)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("PYTHONPATH", str(Path(paceline.__file__).parents[1]))
    Path("model.bin").write_bytes(MODEL)


def blocks(*options: object, tool: tuple[object, ...] = (TOOL, *PLACES)) -> list[str]:
    return ["blocks", *map(str, options), "--", *map(str, tool)]


def run(*options: object, tool: tuple[object, ...] = (TOOL, *PLACES)) -> Result:
    return CliRunner().invoke(app, blocks(*options, tool=tool))


def words(result: Result) -> str:
    return " ".join(result.stderr.replace("│", " ").split())


PLAIN = ("--model", "model.bin", "--layout", "skip:4, w:f32:*", "--lr", 0.25)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--lr", 1), "give the model file to start from: --model FILE"),
        (("--model", "no.bin", "--lr", 1), "the model no.bin does not exist"),
        (("--model", ".", "--lr", 1), "give the model file"),
        (("--model", "model.bin", "--lr", 1), "the format of model.bin is not recognised"),
        (("--model", "model.bin", "--lr", 1, "--layout", "npz"), "cannot be read as npz: it is no whole zip file"),
        (("--model", "model.bin", "--lr", 1, "--layout", "w:f32:4"), "the layout needs 16 bytes, and it has 12"),
        (("--model", "model.bin", "--lr", 1, "--layout", "skip:12, w:f32:*"), "holds no floating-point number"),
        ((*PLAIN, "--rule", "asgd"), "model files need averaging, bmuf or diloco"),
        ((*PLAIN, "--rule", "bmfu"), "there is no rule 'bmfu'"),
        ((*PLAIN, "--workers", 2, "--parts", 3), "give a number of workers that divides it"),
        ((*PLAIN, "--workers", 0), "--workers must be at least 1"),
        ((*PLAIN, "--epochs", 0), "--epochs must be at least 1, got 0"),
        ((*PLAIN[:4], "--lr", -1), "--lr must be a number above 0, got -1"),
        (PLAIN[:4], "needs --lr RATE for {lr}"),
        ((*PLAIN[:4], "--lr-final", 0.1), "--lr-final and --newbob change the rate of --lr"),
        ((*PLAIN, "--newbob"), "say by --loss REGEX where it stands"),
        ((*PLAIN, "--loss", "loss=("), "is no regular expression"),
        ((*PLAIN, "--loss", "(a)(b)"), "has 2 groups; give one"),
        ((*PLAIN, "--hosts", 2), "needs --master HOST:PORT"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options: tuple[object, ...], why: str) -> None:
    result = run(*options)
    assert result.exit_code == 2 and why in words(result), result.output
    assert [path.name for path in Path().iterdir()] == ["model.bin"], "nothing was made"


def made(name: str) -> str:
    Path(name).touch()
    return name


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])}


@pytest.mark.slow  # tests/doors/files kills it at every point
@pytest.mark.processes
def test_workers_that_are_killed_go_on_with_the_same_bytes() -> None:
    """The launcher is killed in the third block, while its tools wait; the bytes are those of virtual workers."""
    waits = "until [ -e go ] || [ {block} -lt 2 ]; do touch waiting-{rank}; sleep 0.02; done"
    tool = f"{sys.executable} -I -S {TOOL} {' '.join(PLACES)}"
    shell = ("sh", "-c", f"{tool} && {waits}")
    options = (*PLAIN, "--workers", 2, "--epochs", 5, "--rule", MOMENTUM, "--loss", "loss=(.+)")
    command = [sys.executable, "-m", "paceline", *blocks(*options, tool=shell)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + DEADLINE_S
        while len(list(Path().glob("waiting-*"))) < 2:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert "holds a run with other options: --rule differ" in words(run(*PLAIN, "--workers", 2, tool=shell))
    Path("go").touch()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "continues after block 2" in done.stderr and "the trained model: model.bin.blocks/trained.bin" in done.stderr
    assert any(line.startswith("[1] part ") for line in done.stdout.splitlines())
    place = Path("model.bin.blocks")
    rows = json.loads((place / "journal.json").read_text())["blocks"]
    assert [row["block"] for row in rows] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in (place / "merged").iterdir()) == [f"block-0000{k}.bin" for k in (3, 4, 5)]
    trained = (place / "trained.bin").read_bytes()
    text = (place / "plan-0.json").read_text().replace("model.bin.blocks", "virtual")
    Path("virtual").mkdir()
    Path("virtual/plan.json").write_text(text)
    paceline.simulate(lambda: train(Plan.read(Path("virtual/plan.json"))), 2)
    assert Path("virtual/trained.bin").read_bytes() == trained != MODEL


@pytest.mark.slow
@pytest.mark.processes
def test_a_tool_that_fails_ends_the_run_with_a_sentence() -> None:
    result = run(*PLAIN, tool=(sys.executable, "-I", "-S", TOOL, *PLACES, "fail"))
    assert result.exit_code == 1
    assert "ended with exit code 3; its last line was 'no room on the device'" in words(result)
    assert "worker 0 on" in words(result) and "the same command continues after the last block" in words(result)
    assert "Traceback" not in result.output and Path("model.bin").read_bytes() == MODEL

# SPDX-License-Identifier: Apache-2.0
"""`paceline plan`: numbers in, a table, a picture, JSON and a recommendation out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import paceline
from paceline.cli import app
from paceline_plugins.forecast.plan_command import inputs
from paceline_plugins.forecast.planner.stopwatch import Timed
from tests.helpers import attached, rank
from tests.update.engine.test_blocks import Scalars
from tests.update.engine.test_diversity import SPEEDS

GIVEN = ("--step-time", 0.1, "--parameters", "1M", "--workers", "1,4", "--rule", "sync", "--rule", "bmuf(period=8)")


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})


def said(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def values(*arguments: object) -> dict[str, Any]:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def test_a_table_and_a_recommendation() -> None:
    result = plan(*GIVEN, "--network", "link(mbit=1000, ms=0.1)")
    assert result.exit_code == 0
    for words in ("1,000,000 parameters (4 MB)", "N=4", "bmuf(period=8)", "for 4 workers:", "1 Gbit/s"):
        assert words in said(result)


def test_a_rule_of_a_module_has_its_name_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("planned.py").write_text("from paceline.rules import *\ndef rule(period=4): return Rule(EveryBlock(period))\n")
    assert "planned:rule(period=2)" in said(plan(*GIVEN, "--rule", "planned:rule(period=2)"))


def test_a_number_of_workers_that_grows_is_told() -> None:
    for rule, told in [("bmuf", False), ("bmuf(grow='auto')", True)]:
        found = plan("--step-time", "0.1", "--parameters", "1M", "--rule", rule)
        assert found.exit_code == 0 and ("after all of them have joined" in found.stderr) == told


def test_a_program_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, asked = tmp_path / "train.py", []
    script.write_text("")

    def timed(*arguments: object) -> Timed:
        asked.append(arguments)
        return Timed((0.1, 0.2, 0.3), ((10, 10), (10,)), moments=2, batches=50)

    monkeypatch.setattr(inputs, "time_script", timed)
    result = plan("--workers", 2, "--rule", "sync", "--json", script, "--lr", 1)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.strip().splitlines()[-1])["setting"]
    assert found["step_s"] == pytest.approx(0.2) and found["spread"] == pytest.approx(0.5)
    assert (found["parameters"], found["moments"], found["epoch"]) == (110, 2, 50)
    assert asked == [(script, ["--lr", "1"], 20, 300.0)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give a training program, or --step-time"),
        (("--step-time", 0.1), "give the model's size"),
        (("--step-time", 0, "--parameters", "1k"), "step time must be"),
        ((*GIVEN, "--network", "10gb"), "did you mean '10gbe'"),
        ((*GIVEN, "--rule", "bumf"), "did you mean 'bmuf'"),
        ((*GIVEN, "--workers", "1,x"), "--workers must be whole numbers"),
        ((*GIVEN, "--workers", "0"), "must lie in 1..65536"),
        (("nowhere.py",), "does not exist"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[object, ...], says: str) -> None:
    result = plan(*arguments)
    assert result.exit_code == 2 and says in said(result)


def test_the_answer_comes_first_and_80_columns_hold_it() -> None:
    arguments = ["plan", "--step-time", "0.1", "--parameters", "25M", "--network", "1gbe"]
    lines = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"}).stdout.splitlines()
    assert lines[0].startswith("for 16 workers: ") and max(map(len, lines)) <= 80
    heads = [line for line in lines if line.startswith(("% at N", "at N="))]
    assert heads[0].split()[-1] == "4096" and heads[1].split()[-1] == "sent"  # whole, nothing folded
    assert sum(line.startswith("streaming_diloco()") for line in lines) == 2


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of 4 workers of which about 2.2 count: their displacements have the mean norm 1.5, their mean has 1."""
    directory = tmp_path_factory.mktemp("log")

    def program() -> None:
        with attached(Scalars(1), "averaging(period=2)", lr=1.0, log=directory) as (run, model, optimizer):
            for step in range(1, 65):
                model.p[0].grad = torch.full_like(model.p[0], -SPEEDS[rank()])
                optimizer.step()
                run.log(loss=step**-0.5)

    paceline.simulate(program, len(SPEEDS))
    return directory


def test_a_log_tells_the_loss_of_other_numbers(logged: Path) -> None:
    found = values("--log", logged, "--network", "link(mbit=1000000)", "--workers", "1,16,1024", "--rule", "sync")
    quality = found["quality"]
    assert quality["rule"] == "averaging(period=2)" and quality["loss"] == "loss" and quality["workers"] == 4
    rows = {row["workers"]: row for row in quality["forecasts"]}
    assert list(rows) == [1, 4, 16]  # 4 are the run's, 1024 are too many
    common = (4 - 2.25) / (2.25 * 3)
    assert rows[16]["effective_workers"] == pytest.approx(16 / (1 + 15 * common), rel=0.02)
    assert rows[16]["loss"] > 1.5 * rows[4]["loss"] > 1.5 * rows[1]["loss"] > 0
    assert rows[16]["speed_up"] == pytest.approx(16, rel=0.01)
    assert quality["pays_up_to"] == 4  # 1 + 1 / common = 4.9
    assert found["setting"]["step_s"] > 0 and found["setting"]["parameters"] == 1


def test_one_sentence_about_speed_and_quality(logged: Path) -> None:
    """At equal samples: the loss of 4 workers over that of one, from the same forecast."""
    found = values("--log", logged, "--network", "link(mbit=1000000)", "--workers", "1,4", "--at", 4, "--rule", "sync")
    losses = {row["workers"]: row["loss"] for row in found["quality"]["forecasts"]}
    percent = math.ceil(100 * (losses[4] / losses[1] - 1))
    assert percent > 1
    assert found["sentence"] == (
        f"4 workers: 4 times as fast, loss within {percent} % of one worker's; beyond 4 workers, each is worth less "
        "than half of one."
    )
    far = values("--log", logged, "--network", "link(mbit=1000000)", "--at", 1024, "--rule", "sync")["sentence"]
    assert "what they learn is not known, since a run of 4 tells of at most 64; beyond 4 workers" in far

# SPDX-License-Identifier: Apache-2.0
"""`paceline tune --search`: one search with real processes, the others with groups that only say how they ended."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner, Result

import paceline
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.launch import Outcome
from paceline.cli.launch.spawn import Command, WorkerProcess
from paceline.cli.main import app
from paceline_plugins.search import command_search_rounds as search_rounds

QUADRATIC = Path(__file__).with_name("quadratic.py")
RATES = ("--search", "lr=log(1e-2,0.25)")


def tune(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tune", *(str(one) for one in arguments)])


def said(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def record(directory: Path) -> list[list[dict[str, Any]]]:
    rounds: list[list[dict[str, Any]]] = json.loads((directory / "search.json").read_text())["rounds"]
    return rounds


# -- with real processes ------------------------------------------------------------------------------------
def after(*pieces: tuple[float, int]) -> float:
    """The weight of the quadratic after so many steps at each rate, from 1."""
    x = torch.ones(1)
    for rate, steps in pieces:
        for _ in range(steps):
            x = x - rate * (4 * x)
    return x.item()


@pytest.mark.processes
def test_the_better_rate_wins_and_is_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "search"
    shape = ("--groups", 2, "--rounds", 2, "--blocks", 4, "--together", 2, "--rule", "bmuf(period=2)")
    result = tune(*RATES, *shape, "--log", home, QUADRATIC, "--any", "thing")
    assert result.exit_code == 0, result.output
    first, second = record(home)
    low, high = sorted(first, key=lambda one: one["values"]["lr"])
    assert low["measure"] > high["measure"] and low["values"]["lr"] < 0.05 < high["values"]["lr"]
    winner, loser = first.index(high), first.index(low)
    assert [one["source"] for one in second] == [winner, winner]
    assert second[winner]["values"] == high["values"] and second[loser]["values"]["lr"] > low["values"]["lr"]
    at = high["values"]["lr"], min(second, key=lambda one: one["measure"])["values"]["lr"]
    weight = load_file(home / "best" / "global.safetensors")["weight"].item()
    assert weight == pytest.approx(after((at[0], 8), (at[1], 8)), rel=1e-4)
    assert f"PACELINE_RESUME={home / 'best'}" in result.output and "paceline report" in result.output
    assert list((home / "round-01").glob("*/checkpoint")) == []
    monkeypatch.setenv("PACELINE_RESUME", str(home / "best"))
    model, optimizer = plain()
    with paceline.attach(model, optimizer, "bmuf(period=2)", checkpoint=tmp_path / "own") as run:
        assert run.resume() and run.minibatches == 16
        assert model.weight.item() == weight
        assert run._context.tuner.tunables.show(["lr"])["lr"] == pytest.approx(at[1])


# -- a round, in this process -------------------------------------------------------------------------------
def plain() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(1, 1, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


# -- without processes --------------------------------------------------------------------------------------

Ending = Callable[[int, int, dict[str, str]], "float | str | signal.Signals | None"]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ending], None]:
    """Groups end as a function of (round, group, environment) says: with a loss, with an error, or too early."""

    def launched(ending: Ending, cluster: LaunchCluster, commands: Sequence[Command]) -> list[Outcome]:
        return [_ended(ending, command) for command in commands]

    return lambda ending: monkeypatch.setattr(search_rounds, "side_by_side", lambda *about: launched(ending, *about))


def _ended(ending: Ending, command: Command) -> Outcome:
    place = command.output.parent
    environment = dict(command.environment)
    what = ending(int(place.parent.name[-2:]), int(place.name[-2:]), environment)
    if isinstance(what, signal.Signals):
        return Outcome(stopped_by=what)
    if isinstance(what, str):
        file = command.output / "rank-000.err"
        file.write_text(what)
        return Outcome({0: 1}, workers=[WorkerProcess(0, None, file, file)])  # type: ignore[arg-type]
    events: list[dict[str, Any]] = [{"kind": "attach", "at_s": 0.0, "rank": 0, "size": 1}]
    if what is not None:
        step = Path(json.loads(environment["PACELINE_ROUND"])["checkpoint"]) / "step-000000004"
        step.mkdir(parents=True)
        (step / "manifest.json").write_text("{}")
        value = {"name": "loss", "value": what if what == what else "nan", "total_minibatches": 4}
        events.append({"kind": "value", "at_s": 1.0, "rank": 0, **value})
    (place / "rank-000.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return Outcome()


def test_a_group_that_fails_is_named_and_copies_the_best(played: Callable[[Ending], None], tmp_path: Path) -> None:
    resumed_from = {}

    def ending(number: int, group: int, environment: dict[str, str]) -> float | str:
        resumed_from[number, group] = environment.get("PACELINE_RESUME", "")
        if number == 1 and group < 2:
            return (float("nan"), "Traceback (most recent call last):\n  x\nValueError: too fast\n")[group]
        return float(10 - group)

    played(ending)
    result = tune(*RATES, "--rounds", 2, "--log", tmp_path / "s", QUADRATIC)
    assert result.exit_code == 0, result.output
    first, second = record(tmp_path / "s")
    assert first[1]["failed"] == "worker 0: ValueError: too fast" and "nan" in first[0]["failed"]
    assert "too fast" in said(result) and "best of round 2: group 3" in said(result)
    assert [one["source"] for one in second] == [3, 3, 2, 3]
    assert [resumed_from[1, group] for group in range(4)] == [""] * 4
    assert resumed_from[2, 0] == str(tmp_path / "s" / "round-01" / "group-03" / "checkpoint" / "step-000000004")


def test_a_search_that_was_stopped_goes_on(played: Callable[[Ending], None], tmp_path: Path) -> None:
    ran: list[tuple[int, int]] = []

    stops = [signal.SIGTERM]

    def ending(number: int, group: int, environment: dict[str, str]) -> float | signal.Signals:
        if (number, group) == (2, 1) and stops:
            return stops.pop()
        ran.append((number, group))
        return float(group)

    played(ending)
    result = tune(*RATES, "--groups", 2, "--rounds", 3, "--log", tmp_path / "s", QUADRATIC)
    assert result.exit_code == 128 + signal.SIGTERM and "paceline tune --again" in said(result)
    before = record(tmp_path / "s")
    assert tune("--again", tmp_path / "s").exit_code == 0
    assert ran == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert record(tmp_path / "s")[0] == before[0]
    assert record(tmp_path / "s")[1][0] == before[1][0]


@pytest.mark.parametrize("number", [1, 3])
def test_a_program_that_comes_to_its_end(number: int, played: Callable[[Ending], None], tmp_path: Path) -> None:
    played(lambda at, group, environment: None if at == number else float(group))
    result = tune(*RATES, "--groups", 2, "--rounds", 9, "--log", tmp_path / "s", QUADRATIC)
    if number == 1:
        assert result.exit_code == 1 and "fewer --blocks" in said(result)
        return
    assert result.exit_code == 0 and "best of round 2: group 0" in said(result)
    assert (tmp_path / "s" / "best" / "manifest.json").exists()
    assert tune("--again", tmp_path / "s").exit_code == 0


def test_what_stops_a_search(played: Callable[[Ending], None], tmp_path: Path) -> None:
    played(lambda number, group, environment: "it broke")
    result = tune(*RATES, "--log", tmp_path / "a", QUADRATIC)
    assert result.exit_code == 1 and "all groups failed in round 1: worker 0: it broke" in said(result)
    played(lambda number, group, environment: 1.0)
    result = tune(*RATES, "--measure", "accuracy", "--log", tmp_path / "b", QUADRATIC)
    assert result.exit_code == 1 and "logs no 'accuracy' (it logs loss): call run.log(accuracy=...)" in said(result)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--search", "lr=0.1", QUADRATIC], "NAME=log(1e-4,1e-1)"),
        (["--search", "period=choice(4,8)", QUADRATIC], "give more --workers"),
        ([*RATES, "--groups", "1", QUADRATIC], "at least 2"),
        ([*RATES], "no program was given"),
        ([*RATES, "nowhere.py"], "does not exist"),
        (["--again", "nowhere"], "does not exist"),
        (["--again", str(QUADRATIC.parent)], "no record of a search"),
        (["--again", str(QUADRATIC.parent), "--rounds", "3"], "leave out rounds"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[object], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = tune(*arguments)
    assert result.exit_code == 2 and says in said(result)
    assert list(tmp_path.iterdir()) == []

# SPDX-License-Identifier: Apache-2.0
"""`auto(within=..)` among virtual workers whose programs log a curve made by hand, and among two processes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import RuleError, UnsupportedError
from paceline.forecast.sim import Clock
from paceline.observe.reports.notices import worker_notice
from paceline.observe.reports.read import read_run
from paceline.tuning import bounded_period, loss_bound
from tests.helpers import Outcome, Place, Program, adam, same_bits, sgd

STEPS = 160
"""Of each of two workers."""
TRAINER = Path(__file__).with_name("within_trainer.py")
Cost = Callable[[Place], float]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_bound, "SETTLE", 2)


def free(place: Place) -> float:
    return 0.0


def dear(place: Place) -> float:
    return 0.03 * (place.run.rule.schedule.period > 4)


def logs(cost: Cost, name: str = "val_loss", after: Callable[[Place], None] = lambda place: None) -> Any:
    """A hook that logs a power law, higher by the cost of the present setting, and keeps the period."""

    def hook(place: Place) -> None:
        place.run.log(**{name: 5.0 * (place.step + 1) ** -0.2 * (1 + cost(place))})
        after(place)
        place.extra.setdefault("periods", []).append(place.run.rule.schedule.period)

    return hook


def go(rule: str, hook: Any, steps: int = STEPS, workers: int = 2, **choices: Any) -> list[Outcome]:
    """A minibatch takes 10 ms and a message 2 ms, so that measured times want 24 of them between two workers."""
    torch.manual_seed(5)
    program = Program(rule, samples=4 * workers * steps, epochs=1, after_step=hook, **choices)
    time = Clock(compute=0.01, network=0.002)
    return [out for out in paceline.simulate(program, workers, clock=time) if out is not None]


def changes(out: Outcome) -> list[int]:
    """The periods one after another."""
    found: list[int] = out.extra["periods"]
    return [one for k, one in enumerate(found) if k == 0 or found[k - 1] != one]


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_the_period_grows_where_that_costs_nothing(optimizer: Any) -> None:
    outs = go("auto(within=1%)", logs(free), 2 * STEPS, optimizer=optimizer)
    assert changes(outs[0]) == [4, 8, 16, 24]
    assert outs[0].extra["periods"] == outs[1].extra["periods"]
    assert same_bits(outs[0].model, outs[1].model) and same_bits(outs[0].exported, outs[1].exported)


def test_what_costs_too_much_is_taken_back_and_the_run_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        outs = go("auto(within=0.01)", logs(dear), settings={"log": tmp_path / "log"})
    assert changes(outs[0])[:3] == [4, 8, 4] and outs[0].extra["periods"] == outs[1].extra["periods"]
    run = read_run(tmp_path / "log")
    said = [one.getMessage() for one in caplog.records if one.getMessage().startswith("within 1 %")]
    assert "period 4 -> 8 is tried" in said[0] and "period 4 -> 8 is withdrawn: the held-out loss is 3 %" in said[1]
    assert said[-1].startswith("within 1 %: period 4 where measured times want 24; exchanges took ")
    assert "changes kept: 0, withdrawn: " in said[-1] and "by val_loss" in said[-1]
    assert run.why == said[-1]
    assert [tuple(line.changes["period"]) for line in run.tuned[:2]] == [(4, 8), (8, 4)]
    notice = worker_notice(0, {"kind": "within", "text": said[0]}, 1.0)
    assert notice is not None and notice.text == said[0]


def test_only_one_worker_may_log() -> None:
    def hook(place: Place) -> None:
        (logs(free) if place.rank == 1 else logs(free, "loss"))(place)

    outs = go("auto(within=1%)", hook)
    assert changes(outs[0])[:2] == [4, 8] and outs[0].extra["periods"] == outs[1].extra["periods"]


def test_a_program_without_a_held_out_loss_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bounded_period, "SILENT", 4)
    with caplog.at_level(logging.INFO, "paceline"):
        outs = go("auto(within=1%)", logs(free, "loss"), 60)
    assert changes(outs[0]) == [4]
    said = [one for one in caplog.records if "logged no held-out loss" in one.getMessage()]
    assert [one.levelname for one in said] == ["WARNING", "INFO"]
    assert "in 4 blocks" in said[0].getMessage() and "at all" in said[1].getMessage()
    assert "the period was 4 where measured times want 24" in said[1].getMessage()


def test_a_user_who_sets_the_period_has_it() -> None:
    def ask(place: Place) -> None:
        if (place.rank, place.step) == (1, 20):
            place.run.tune(period=6)

    outs = go("auto(within=1%)", logs(free, after=ask))
    assert changes(outs[0]) == changes(outs[1]) == [4, 6]


@pytest.mark.parametrize("at", [61, 90])
def test_a_resumed_run_decides_as_the_one_that_went_on(tmp_path: Path, at: int) -> None:
    """In the first trial, and after it."""
    whole = go("auto(within=1%)", logs(free), save_at=at, save_to=tmp_path / "saved", shuffle=False)
    rest = go("auto(within=1%)", logs(free), resume=tmp_path / "saved", shuffle=False)
    for out, other in zip(rest, whole, strict=True):
        assert out.extra["periods"] == other.extra["periods"][at:]
        assert same_bits(out.model, other.model) and same_bits(out.exported, other.exported)
    assert 8 in whole[0].extra["periods"]


def test_another_number_of_workers_goes_on_from_what_is_spent(tmp_path: Path) -> None:
    costs = logs(lambda place: 0.004 * (place.run.rule.schedule.period > 4))
    go("auto(within=1%)", costs, 150, save_at=140, save_to=tmp_path / "saved", stop_at=140)

    def hook(place: Place) -> None:
        costs(place)
        place.extra["bound"] = place.run._context.tuner.measured.period_controller.bound

    outs = go("auto(within=1%)", hook, 150, 3, resume=tmp_path / "saved")
    assert outs[0].extra["periods"] == outs[2].extra["periods"] and same_bits(outs[0].model, outs[2].model)
    assert all(0.0039 < out.extra["bound"].spent < 0.01 for out in outs)


# -- the average -------------------------------------------------------------------------------------------------------


def test_the_average_spans_as_many_minibatches_at_every_period() -> None:
    rule = paceline.rule_from_text("auto(within=1%, ema=0.9)")
    longer = replace(rule, schedule=replace(rule.paced, period=12))
    assert (rule.merging.decay, longer.merging.decay) == pytest.approx((0.9, 0.9**3))
    assert paceline.rule_from_text("auto(within=1%)").settings.ema == 0.97
    assert paceline.rule_from_text("auto(within=1%, ema=0)").settings.ema == 0
    assert paceline.rule_from_text("auto").settings.ema == 0


# -- what is asked for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1%", "'1%'", "0.01", " 1.0 % ", '"1 %"'])
def test_a_bound_in_words(text: str) -> None:
    rule = paceline.rule_from_text(f"auto(within={text}, longest=8)")
    assert rule.paced.bound == pytest.approx(0.01) and rule.settings.within == ""
    assert paceline.rule_from_text(rule.text()) == rule
    assert "only while the held-out loss stays within 1 %" in rule.schedule.describe(4)


@pytest.mark.parametrize("value", [-0.01, 0, 0.51, "60%", "0%", "-1%", "much", "nan", float("inf"), True, None, (1,)])
def test_what_is_no_bound_is_refused(value: Any) -> None:
    with pytest.raises(RuleError, match="within must be a share of the held-out loss such as '1%'"):
        paceline.rules.recipes.auto(within=value)


def test_the_word_host_is_what_it_was() -> None:
    rule = paceline.rule_from_text("auto(within='host')")
    assert rule.settings.within == "host" and rule.paced.bound is None


def test_zero_lines_cannot_log_and_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="needs the held-out loss, which a program with zero lines cannot log"):
        paceline.attach(model, sgd(model.parameters()), "auto(within=1%)", data="split")


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_two_processes(tmp_path: Path) -> None:
    """However fast they are, measured times want the longest period; each logs the same curve, which is free."""
    rule = "auto(within=1%, share=1e-6, longest=8)"
    command = [sys.executable, "-m", "paceline", "run", "--quiet", "--workers", "2", "--log", str(tmp_path / "log")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(paceline.__file__).parents[1])
    whole = [*command, "--rule", rule, str(TRAINER), str(tmp_path)]
    subprocess.run(whole, env=environment, check=True, timeout=180, capture_output=True)
    told = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(2)]
    assert told[0] == told[1] and told[0]["periods"] == [4, 8]
    run = read_run(tmp_path / "log")
    assert run.why.startswith("within 1 %: period 8 where measured times want 8")

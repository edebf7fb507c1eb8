# SPDX-License-Identifier: Apache-2.0
"""The network changes in mid-run, among virtual workers with a clock: `auto` chooses anew, the same everywhere."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.forecast.sim import Clock
from paceline.observe.reports.notices import worker_notice
from paceline.tuning.choice_watch import PATIENCE
from paceline.tuning.watch_timers import EVERY, SIMULATED
from tests.helpers import Outcome, Place, Program, adam, momentum_sgd, same_bits

FAST, SLOW, SLOWEST = 1e-6, 0.004, 0.02
"""Seconds of each of an exchange's two messages, beside 10 ms of computing: synchronous steps, dense, bf16."""
PROBE = 10
CHANGE = 40
"""Steps after which the network is another."""
OF_BLOCKS, OF_SYNC = 120, 2 * EVERY + 20
"""Steps in which a run that was in blocks, or synchronous, chooses anew."""


@dataclass
class Changing(Clock):
    """A message takes `network` seconds up to a step, and `then` seconds from it on."""

    then: float = 0.0
    workers: int = 2

    def message_s(self, source: int, to: int, nbytes: int, number: int) -> float:
        assert isinstance(self.network, float)
        return self.network if number // (2 * self.workers - 2) < CHANGE else self.then


def go(before: float, after: float, steps: int, rule: str = "auto", workers: int = 2, **choices: Any) -> list[Outcome]:
    torch.manual_seed(5)
    program = Program(rule, **{"samples": 4 * workers * steps, "epochs": 1, "after_step": look, **choices})
    clock = Changing(compute=0.01, network=before, then=after, workers=workers)
    return [out for out in paceline.simulate(program, workers, clock=clock) if out is not None]


def look(place: Place) -> None:
    tunables = place.run._context.tuner.tunables
    place.extra.setdefault("rules", []).append(place.run.rule.text())
    place.extra.setdefault("factors", []).append(tunables.rates.common * tunables.rates.factor(0))
    place.extra.setdefault("beta1", []).append(place.optimizer.param_groups[0].get("betas", [0.0])[0])


def phases(values: list[Any]) -> list[tuple[Any, int]]:
    """(value, after how many steps it begins)."""
    return [(value, k) for k, value in enumerate(values) if k == 0 or value != values[k - 1]]


# -- what is chosen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [momentum_sgd, adam])
def test_blocks_become_synchronous_steps_on_a_faster_network(optimizer: Any) -> None:
    outs = go(SLOW, FAST, OF_BLOCKS, optimizer=optimizer)
    (asked, _), (blocks, _), (again, began), (sync, chosen) = phases(outs[0].extra["rules"])
    assert (asked, again, sync) == ("auto()", "auto()", "sync()") and "overlap" in blocks
    assert began >= CHANGE + PATIENCE * SIMULATED - SIMULATED and chosen == began + PROBE + 1
    for out in outs:
        assert out.extra["rules"] == outs[0].extra["rules"]
        assert same_bits(out.model, outs[0].model) and same_bits(out.model, out.exported)


def test_synchronous_steps_become_blocks_on_a_slower_network() -> None:
    outs = go(FAST, SLOWEST, OF_SYNC)
    (_, _), (sync, _), (again, began), (blocks, chosen) = phases(outs[0].extra["rules"])
    assert (sync, again) == ("sync()", "auto()") and "codec='bf16'" in blocks
    assert began == PATIENCE * EVERY and chosen == began + PROBE // 2 + 1, "hopeless after the first half"
    assert all(out.extra["rules"] == outs[0].extra["rules"] for out in outs)
    assert same_bits(outs[0].model, outs[1].model) and same_bits(outs[0].model, outs[0].exported)


@pytest.mark.parametrize(
    ("before", "after", "codecs"), [(SLOW, SLOWEST, ["dense", "bf16"]), (SLOWEST, SLOW, ["bf16", "dense"])]
)
def test_blocks_take_another_codec(before: float, after: float, codecs: list[str]) -> None:
    outs = go(before, after, OF_BLOCKS)
    found = [rule.split("codec=")[1].strip("')") for rule, _ in phases(outs[0].extra["rules"]) if "codec" in rule]
    assert found == codecs
    assert same_bits(outs[0].model, outs[1].model)


def test_the_learning_rate_and_beta1_follow() -> None:
    def slow(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01, betas=(0.9, 0.99))

    for out in go(SLOW, FAST, OF_BLOCKS, optimizer=slow):
        assert [value for value, _ in phases(out.extra["factors"])] == [1.0, 2**0.29, 1.0, 2**0.5]
        assert [value for value, _ in phases(out.extra["beta1"])] == [0.9, 0.5, 0.9]
    for out in go(FAST, SLOW, OF_SYNC, optimizer=slow):
        assert [value for value, _ in phases(out.extra["factors"])] == [1.0, 2**0.5, 1.0, 2**0.29]
        assert [value for value, _ in phases(out.extra["beta1"])] == [0.9, 0.5]


def test_a_network_that_stays_changes_nothing() -> None:
    for seconds, steps in ((FAST, OF_SYNC), (SLOW, OF_BLOCKS), (SLOWEST, OF_BLOCKS)):
        assert len(phases(go(seconds, seconds, steps)[0].extra["rules"])) == 2


def test_a_change_that_chooses_the_same_probes_nothing() -> None:
    """Synchronous steps stay, with half a millisecond, and blocks stay, with a third more."""
    assert len(phases(go(FAST, 0.0001, OF_SYNC)[0].extra["rules"])) == 2
    assert len(phases(go(SLOW, 1.3 * SLOW, OF_BLOCKS)[0].extra["rules"])) == 2


def test_state_that_stays_on_its_worker_stays_in_blocks() -> None:
    def rmsprop(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters, lr=0.01)

    outs = go(SLOW, FAST, OF_BLOCKS, optimizer=rmsprop)
    assert len(phases(outs[0].extra["rules"])) == 2
    outs = go(FAST, SLOW, OF_SYNC, optimizer=rmsprop)
    assert len(phases(outs[0].extra["rules"])) == 4


def test_a_period_that_was_set_stays() -> None:
    def hook(place: Place) -> None:
        if (place.rank, place.step) == (1, 20):
            place.run.tune(period=6)
        look(place)
        place.extra.setdefault("periods", []).append(place.run.rule.schedule.period)

    outs = go(SLOW, SLOWEST, OF_BLOCKS, after_step=hook)
    assert len(phases(outs[0].extra["rules"])) == 4 and outs[0].extra["periods"][-1] == 6
    assert outs[0].extra["periods"] == outs[1].extra["periods"]


# -- state -------------------------------------------------------------------------------------------------------------


def test_the_outer_state_goes_on_and_codecs_begin_anew() -> None:
    """The count of blocks, and block momentum's velocity; and no residual of int8 is left to add to what is dense."""

    def hook(place: Place) -> None:
        look(place)
        blocks = place.run._parts.engine.blocks
        if blocks is not None:
            velocity = sum(float(one.tensors["delta"].square().sum()) for one in blocks.updates[0].state.parameters)
            residuals = [len(chunk.state) for chunk in blocks.updates[0].chunks]
            place.extra.setdefault("seen", []).append((place.step, blocks.block, velocity > 0, residuals))

    outs = go(0.04, SLOW, OF_BLOCKS, "auto(longest=8)", after_step=hook)
    rules = phases(outs[0].extra["rules"])
    assert "int8" in rules[1][0] and "dense" in rules[3][0]
    began, chosen = rules[2][1], rules[3][1]
    seen = outs[0].extra["seen"]
    last = [row for row in seen if row[0] <= began][-1]
    first = next(row for row in seen if row[0] > chosen)
    assert last[2] and first[2] and first[1] >= last[1] + 1 > 4, "the flush is one more block"
    assert all(last[3]) and not any(first[3])


@pytest.mark.parametrize(
    ("before", "after", "back"),
    [(SLOW, FAST, -14), (SLOW, FAST, -6), (SLOW, FAST, -2), (SLOW, FAST, 4), (SLOW, SLOWEST, -2), (SLOWEST, FAST, -2)],
)
def test_stop_and_resume(before: float, after: float, back: int, tmp_path: Path) -> None:
    """Shortly before the second probe, in either half, and after it: with the same bits."""
    full: dict[str, Any] = {"optimizer": adam, "dropout": 0.3, "schedule": True, "save_to": tmp_path / "c"}
    whole = go(before, after, OF_BLOCKS, **full)
    at = phases(whole[0].extra["rules"])[3][1] + back
    go(before, after, OF_BLOCKS, **full, save_at=at, stop_at=at)
    resumed = go(before, after, OF_BLOCKS, **full, resume=tmp_path / "c")
    for out, other in zip(resumed, whole, strict=True):
        assert out.extra["rules"] == other.extra["rules"][at:]
        assert out.extra["factors"] == other.extra["factors"][at:]
        assert same_bits(out.model, other.model) and same_bits(out.exported, other.exported)
        assert out.losses == other.losses[at:]


@pytest.mark.parametrize(("workers", "back"), [(1, 4), (3, -3)])
def test_another_number_of_workers_goes_on_from_there(workers: int, back: int, tmp_path: Path) -> None:
    whole = go(SLOW, FAST, OF_BLOCKS, optimizer=adam)
    at = phases(whole[0].extra["rules"])[3][1] + back
    go(SLOW, FAST, OF_BLOCKS, optimizer=adam, save_at=at, stop_at=at, save_to=tmp_path / "c")
    more: dict[str, Any] = {"optimizer": adam, "epochs": 2, "samples": 8 * OF_BLOCKS}
    outs = go(SLOW, FAST, OF_BLOCKS, "auto", workers, resume=tmp_path / "c", **more)
    assert outs[0].extra["rules"][0] == "auto()" and outs[0].extra["factors"][0] == 1.0
    assert all(same_bits(out.model, outs[0].model) for out in outs)


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        ("auto", SLOW, FAST),
        ("auto(overlap=3)", SLOW, SLOWEST),
        ("auto(fragments=2, overlap=2)", SLOW, FAST),
        ("auto", FAST, SLOW),
    ],
)
def test_workers_that_run_out_of_data_choose_as_well(rule: str, before: float, after: float) -> None:
    """Before the change, and in the second probe."""
    long = OF_SYNC if before == FAST else OF_BLOCKS

    def program() -> tuple[str, list[float]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        run = paceline.attach(model, optimizer, rule)
        for _ in range([long, 30, long - 25][run.world.rank]):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().square().backward()
            optimizer.step()
        run.close()
        return run.rule.text(), [float(x) for p in model.parameters() for x in p.detach().flatten()]

    clock = Changing(compute=0.01, network=before, then=after, workers=3)
    outs = paceline.simulate(program, 3, clock=clock)
    assert outs[0] is not None and all(out == outs[0] for out in outs)
    assert (outs[0][0] == "sync()") == (after == FAST)


# -- what is said ------------------------------------------------------------------------------------------------------


def test_the_log_and_watch_say_what_changed_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        outs = go(SLOW, FAST, OF_BLOCKS, settings={"log": tmp_path / "log"})
    began = phases(outs[0].extra["rules"])[2][1]
    said = [line.getMessage() for line in caplog.records if line.getMessage().startswith("auto")]
    assert said[1:] == [
        "auto: probes again, after blocks, dense, overlapped by 1: an exchange takes 0.00025 times as long as after "
        "the last choice",
        "auto: synchronous steps: exchanging gradients keeps a worker for 0.002 ms beside 0.01 s of computing "
        "(limit 2 %) (before: blocks, dense, overlapped by 1); the learning rate is 1.41 times one worker's",
    ]
    log = next((tmp_path / "log").glob("*0*.jsonl")).read_text().splitlines()
    events = [event for event in map(json.loads, log) if event["kind"] == "rule"]
    assert [event["why"] for event in events] == said and events[1]["total_minibatches"] == began + 1
    notice = worker_notice(0, events[1], 1.0)
    assert notice is not None and notice.text == said[1]

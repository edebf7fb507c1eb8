# SPDX-License-Identifier: Apache-2.0
"""What a run tells its sinks and whoever scrapes it: of one worker, and of several virtual ones."""

from __future__ import annotations

import math
import urllib.error
import urllib.request
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

import paceline
from paceline.observe.sinks.exposition import text
from paceline.observe.sinks.metrics import split
from tests.observe.sinks.test_feeder import Kept

OWN = {
    "block", "exchanges", "minibatches", "bytes_sent", "computing_s", "waiting_s", "exchanging_s",
    "waiting_for_data_s", "left_out", "workers",
}  # fmt: skip


def train(run: paceline.Run, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 8) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss.item(), step=step)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.update.monitor.FOLD_S", 0.0)


@pytest.mark.usefixtures("often")
def test_the_first_of_several_workers_tells_values_and_numbers() -> None:
    sinks = [Kept() for _ in range(3)]

    def program() -> int:
        model, optimizer = made()
        with paceline.attach(model, optimizer, rule="bmuf", period=2) as run:
            run.log_to(sinks[run.world.rank], every_s=0.0)
            train(run, model, optimizer)
            return run.world.rank

    assert paceline.simulate(program, workers=3) == [0, 1, 2]
    first, *others = sinks
    assert all(sink.got == [] and sink.closed for sink in others) and first.closed
    assert [values["step"] for _, values in first.got if "step" in values] == list(range(8))
    own = [
        (step, {name.removeprefix("paceline/"): x for name, x in values.items()})
        for step, values in first.got
        if "loss" not in values
    ]
    assert {*OWN, "lr", "period", "outer_momentum", "outer_lr", "gain", "minibatches_per_s"} <= own[-1][1].keys()
    assert [values["block"] for _, values in own][:4] == [1, 2, 3, 4]
    assert [values["minibatches"] for _, values in own][:4] == [2, 4, 6, 8] == [step for step, _ in own][:4]
    last = own[-1][1]
    assert (last["lr"], last["period"], last["workers"]) == (0.01, 2.0, 3.0) and last["bytes_sent"] > 0
    assert all(math.isfinite(x) for x in last.values())


def scrape(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert all(family.documentation and family.type in ("gauge", "counter") for family in families)
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "host"))): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.usefixtures("often")
def test_prometheus_reads_the_page_of_a_run() -> None:
    model, optimizer = made()
    run = paceline.attach(model, optimizer)
    address = run.serve_metrics("127.0.0.1:0")
    assert scrape(address)["paceline_minibatches_total", (("rank", "0"),)] == 0
    train(run, model, optimizer)
    run.log(loss=float("nan"))
    found = scrape(address)
    assert found["paceline_minibatches_total", (("rank", "0"),)] == 8
    assert found["paceline_setting", (("name", "lr"), ("rank", "0"))] == 0.01
    assert found["paceline_seconds_total", (("part", "computing"), ("rank", "0"))] > 0
    assert math.isnan(found["paceline_value", (("name", "loss"), ("rank", "0"))])
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{address}/secrets", timeout=30)
    run.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=30)


def test_an_address_that_is_taken_is_refused() -> None:
    runs = [paceline.attach(*made()) for _ in range(2)]
    address = runs[0].serve_metrics("127.0.0.1:0")
    with pytest.raises(paceline.UnsupportedError, match="cannot serve metrics at"):
        runs[1].serve_metrics(address)
    for run in runs:
        run.close()


@pytest.mark.parametrize("address", ["9400", ":9400", "host:", "host:http", "host:-1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(paceline.UnsupportedError, match="HOST:PORT"):
        split(address)


def test_strange_names_and_numbers_are_text_that_can_be_read() -> None:
    values = {'a "b"\\\n': 1.5, "up": math.inf, "down": -math.inf, "big": 1e300, "paceline/sample": 2.0}
    page = text(values, {"host": 'x"y'})
    (family, setting) = text_string_to_metric_families(page)
    assert [(s.labels["name"], s.labels["host"], s.value) for s in family.samples] == [
        ('a "b"\\\n', 'x"y', 1.5), ("up", 'x"y', math.inf), ("down", 'x"y', -math.inf), ("big", 'x"y', 1e300)
    ]  # fmt: skip
    assert setting.name == "paceline_setting"


def test_settings_by_group_where_groups_differ() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.2}]
    run = paceline.attach(model, torch.optim.SGD(groups, lr=1.0, momentum=0.5))
    numbers = run._context.tuner.knobs.numbers()
    assert (numbers["lr/0"], numbers["lr/1"], numbers["momentum"]) == (0.1, 0.2, 0.5) and "lr" not in numbers
    run.close()

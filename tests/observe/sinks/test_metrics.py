# SPDX-License-Identifier: Apache-2.0
"""What a run tells its sinks and whoever scrapes it: of one worker, and of several virtual ones."""

from __future__ import annotations

import math
import urllib.error
import urllib.request
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

import paceline
from paceline.observe.sinks.metrics import families, split_address
from tests.observe.sinks.test_async_writer import Kept

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
    with paceline.attach(model, optimizer) as run:
        address = run.serve_metrics("127.0.0.1:0")
        assert scrape(address)["paceline_minibatches_total", (("rank", "0"),)] == 0
        train(run, model, optimizer)
        run.log(loss=float("nan"))
        found = scrape(address)
        assert found["paceline_minibatches_total", (("rank", "0"),)] == 8
        assert found["paceline_setting", (("name", "lr"), ("rank", "0"))] == 0.01
        assert found["paceline_seconds_total", (("part", "computing"), ("rank", "0"))] > 0
        assert math.isnan(found["paceline_value", (("name", "loss"), ("rank", "0"))])
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
        split_address(address)


PAGE = r"""
# HELP paceline_block Number of the last block that was exchanged; under asynchronous rules, pushes.
# TYPE paceline_block gauge
paceline_block{rank="3",host="alpha"} 1
# HELP paceline_exchanges_total Exchanges that this worker took part in.
# TYPE paceline_exchanges_total counter
paceline_exchanges_total{rank="3",host="alpha"} 2
# HELP paceline_minibatches_total Minibatches of this worker.
# TYPE paceline_minibatches_total counter
paceline_minibatches_total{rank="3",host="alpha"} 3
# HELP paceline_samples_total Samples of this worker, counted by run.share.
# TYPE paceline_samples_total counter
paceline_samples_total{rank="3",host="alpha"} 4
# HELP paceline_sent_bytes_total Bytes sent to other workers.
# TYPE paceline_sent_bytes_total counter
paceline_sent_bytes_total{rank="3",host="alpha"} 5
# HELP paceline_left_out_total Contributions of any worker that were rejected.
# TYPE paceline_left_out_total counter
paceline_left_out_total{rank="3",host="alpha"} 6
# HELP paceline_workers Workers of the run.
# TYPE paceline_workers gauge
paceline_workers{rank="3",host="alpha"} 7
# HELP paceline_seconds_total Seconds of the training thread, by activity.
# TYPE paceline_seconds_total counter
paceline_seconds_total{rank="3",host="alpha",part="computing"} 8
paceline_seconds_total{rank="3",host="alpha",part="waiting"} 9
paceline_seconds_total{rank="3",host="alpha",part="exchanging"} 10
paceline_seconds_total{rank="3",host="alpha",part="data"} 11
# HELP paceline_minibatches_per_second Recent minibatches a second.
# TYPE paceline_minibatches_per_second gauge
paceline_minibatches_per_second{rank="3",host="alpha"} 12
# HELP paceline_samples_per_second Recent samples a second.
# TYPE paceline_samples_per_second gauge
paceline_samples_per_second{rank="3",host="alpha"} 13
# HELP paceline_setting Present value of a tunable.
# TYPE paceline_setting gauge
paceline_setting{rank="3",host="alpha",name="lr/0"} 0.1
paceline_setting{rank="3",host="alpha",name="period"} 16
# HELP paceline_value Last value passed to run.log.
# TYPE paceline_value gauge
paceline_value{rank="3",host="alpha",name="loss"} 0.25
paceline_value{rank="3",host="alpha",name="a \"b\"\\\n"} 1.5
paceline_value{rank="3",host="alpha",name="up"} +Inf
paceline_value{rank="3",host="alpha",name="big"} 1e+300
"""


def samples(page: str) -> dict[tuple[str, ...], float]:
    """Name, kind, help and labels of each sample of a page -> its value."""
    return {
        (sample.name, family.type, family.documentation, *sorted(map("=".join, sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_the_page_has_the_names_labels_and_values_that_dashboards_know() -> None:
    known = [
        "block", "exchanges", "minibatches", "samples", "bytes_sent", "left_out", "workers", "computing_s",
        "waiting_s", "exchanging_s", "waiting_for_data_s", "minibatches_per_s", "samples_per_s",
    ]  # fmt: skip
    values = {f"paceline/{name}": float(count) for count, name in enumerate(known, 1)}
    values |= {"paceline/lr/0": 0.1, "paceline/period": 16.0}
    values |= {"loss": 0.25, 'a "b"\\\n': 1.5, "up": math.inf, "big": 1e300}

    class Given:
        def collect(self) -> Any:
            return families(values, {"rank": "3", "host": "alpha"})

    registry = CollectorRegistry()
    registry.register(Given())
    assert samples(generate_latest(registry).decode()) == samples(PAGE)

# SPDX-License-Identifier: Apache-2.0
"""Networks: presets, texts, files, and what the doctor measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RuleError
from paceline_plugins.forecast.doctor.measured import Machine, Measurements
from paceline_plugins.forecast.doctor.measured import MeasuredLink as Seen
from paceline_plugins.forecast.planner import PRESETS, Network, NetworkLink, network_from_text


def test_presets_go_by_their_names() -> None:
    for name, network in PRESETS.items():
        assert network_from_text(name) is network and network.name == name and name in network.describe()
    assert PRESETS["1gbe"].across.bandwidth_bytes_s < 125e6 < 10 * PRESETS["1gbe"].across.bandwidth_bytes_s
    assert PRESETS["nvlink"].hosts(10) == ("host0",) * 8 + ("host1",) * 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("10gb", "did you mean '10gbe'"),
        ("nothing.json", "give one of 1gbe"),
        ("link(bits=1)", "link has no setting 'bits'"),
        ("link(mbit='a')", "must be a number"),
        ("link(mbit=0)", "must be above 0"),
        ("link(ms=-1)", "at least 0"),
        ("link(per_host=0)", "at least 1"),
        ("link(1)", "need names"),
    ],
)
def test_texts_that_are_no_network(text: str, says: str) -> None:
    with pytest.raises(RuleError, match=says.replace("(", r"\(")):
        network_from_text(text)


def written(path: Path, values: Any) -> str:
    path.write_text(json.dumps(values))
    return str(path)


def test_files_that_are_not_of_the_doctor(tmp_path: Path) -> None:
    for wrong in ([], {"x": 1}, {"links": [1]}):
        with pytest.raises(RuleError, match="no measurements of paceline doctor --json"):
            network_from_text(written(tmp_path / "wrong.json", wrong))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(RuleError, match="no measurements of paceline doctor --json"):
        network_from_text(str(tmp_path / "broken.json"))


def seen(source: int, target: int, trip_s: float, bandwidth: float | None) -> Seen:
    return Seen(source, target, address="x", latency_s=trip_s, bandwidth_bytes_s=bandwidth)


def test_what_the_doctor_measured(tmp_path: Path) -> None:
    hosts = ("a", "a", "b", "b")
    machines = {rank: Machine(rank, host) for rank, host in enumerate(hosts)}
    links = [
        seen(i, j, *((2e-5, 1e9) if hosts[i] == hosts[j] else (2e-3, 1e8 - i)))
        for i in range(4)
        for j in range(4)
        if i != j
    ]
    found = network_from_text(written(tmp_path / "doctor.json", Measurements(4, machines, links).to_json()))
    assert found == Network("doctor", NetworkLink(1e-3, 1e8 - 3), NetworkLink(1e-5, 1e9), 2)

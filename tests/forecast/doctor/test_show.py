# SPDX-License-Identifier: Apache-2.0
"""What a person sees: tables and JSON."""

from __future__ import annotations

from dataclasses import asdict
from io import StringIO

from rich.console import Console

from paceline_plugins.forecast.doctor.judge import judge
from paceline_plugins.forecast.doctor.measured import Machine, MeasuredLink, Measurements, from_json
from paceline_plugins.forecast.doctor.show import print_all

from .examples import broken, cluster


def printed(found: Measurements, parameters: int | None = None) -> str:
    sheet = StringIO()
    print_all(Console(file=sheet, width=160), found, judge(found, parameters), parameters)
    return sheet.getvalue()


def test_the_terminal_ends_with_what_is_wrong_and_the_verdict() -> None:
    lines = printed(broken(cluster(), [(0, 2), (1, 2)]), 25_600_000).splitlines()
    assert lines[0].strip() == "bandwidth from row to column"
    assert lines[2].split() == ["0", "node0", "1000", "Mbit/s", "none"]
    assert lines[-4].startswith("WRONG connections: no worker reaches rank 2 on node2")
    assert lines[-3].strip().startswith("-> ")
    assert lines[-2] == ("one exchange of 25.6 M fp32 parameters among 3 workers takes 1.1 s or more at 1000 Mbit/s")
    assert lines[-1] == "not fit: 1 thing is wrong"
    assert printed(cluster()).splitlines()[-1] == "fit for training"


def test_values_come_back_from_json_the_same_and_what_is_unknown_is_left_out() -> None:
    found = cluster()
    assert from_json(MeasuredLink, {**asdict(found.links[0]), "new": 1}) == found.links[0]
    assert from_json(Machine, {**asdict(found.machines[0]), "new": 1}) == found.machines[0]

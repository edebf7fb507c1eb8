# SPDX-License-Identifier: Apache-2.0
"""The event log: one JSON object a line, whatever the values are."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.observe.event_log import EventLog, log_name


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=lambda word: 1 / 0) for line in path.read_text().splitlines()]


def test_what_json_lacks_becomes_text(tmp_path: Path) -> None:
    journal = EventLog(tmp_path, 0)
    journal.write("value", a=float("nan"), b=float("inf"), c=-float("inf"), d=1.5)
    journal.close()
    assert journal.path is not None
    (event,) = lines(journal.path)
    assert [event[k] for k in "abcd"] == ["nan", "inf", "-inf", 1.5]


def test_two_runs_never_share_a_file(tmp_path: Path) -> None:
    journals = [EventLog(tmp_path, 0) for _ in range(3)]
    for journal in journals:
        journal.close()
    assert [j.path.name for j in journals if j.path] == [log_name(0, k) for k in (1, 2, 3)]
    assert log_name(0, 2) == "rank-000.2.jsonl"

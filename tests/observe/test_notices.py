# SPDX-License-Identifier: Apache-2.0
"""Events as sentences, each happening once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.observe.reports.notices import JsonLinesTail, Notice, Notices, worker_notice

UNDONE = {"kind": "tune", "by": 1, "revert": False, "changes": {"lr": [0.1, 0.05]}, "block": 9}
GONE = {"rank": 2, "state": "silent", "text": "is gone"}


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"kind": "exchange", "block": 3}, None),
        ({"kind": "lost", "rank_lost": 2, "why": "it was reset"}, "worker 2 is lost: it was reset"),
        ({"kind": "takeover", "slice_of": 2, "version": 7}, "worker 1 takes over from 2"),
        ({"kind": "error", "message": "ValueError: odd\nmore"}, "worker 1: ValueError: odd"),
        ({"kind": "tune", "at_s": 1, "rank": 1, "lr": 0.01, "from": None}, "tune: lr=0.01"),
        ({"kind": "tune", "by": 0, "changes": {"period": [4, 64]}, "block": 9, "why": "slow"}, "period 4 → 64: slow"),
        (UNDONE, "lr 0.1 → 0.05: asked by worker 1"),
        ({**UNDONE, "revert": True}, "undone: lr 0.1 → 0.05: asked by worker 1"),
        ({"kind": "tune", "by": 1, "wanted": {}, "refused": "no lr"}, "asked by worker 1 to tune, refused: no lr"),
        ({"kind": "waiting", "workers": [{"state": "waits"}, GONE]}, "the exchange failed: worker 2 is gone"),
    ],
)  # fmt: skip
def test_events_of_workers(event: dict[str, Any], text: str | None) -> None:
    found = worker_notice(1, event, 5.0)
    assert (found.text if found else None) == text


def test_one_happening_is_told_once_and_as_it_was_first_seen() -> None:
    collected = Notices()
    for at_s in (5.0, 4.0, 6.0):
        collected.add(Notice(at_s, "lost 2", f"seen at {at_s}"))
    collected.add(Notice(1.0, "saved", "saved"))
    collected.add(None)
    assert [one.text for one in collected.newest(9)] == ["saved", "seen at 4.0"]
    assert collected.newest(0) == []


def test_a_growing_file_is_read_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "control.jsonl"
    growing = JsonLinesTail(path)
    assert list(growing.read()) == []
    path.write_bytes(b'{"kind": "joined"}\n[1]\nnothing\n{"kind": ')
    assert list(growing.read()) == [{"kind": "joined"}]
    with path.open("ab") as file:
        file.write(b'"lost"}\n')
    assert list(growing.read()) == [{"kind": "lost"}]

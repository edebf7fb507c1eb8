# SPDX-License-Identifier: Apache-2.0
"""The way of one exchange through the source may only become shorter: `python benchmarks/house/way.py` prints it."""

from __future__ import annotations

import pytest

GOALS = {
    "exchange_files": 25,
    "exchange_calls": 220,
    "exchange_changes": 100,
    "exchange_frames": 14,
    "quiet_step_files": 8,
    "attach_files": 50,
    "attach_changes": 120,
    "share_files": 10,
    "share_changes": 35,
    "push_files": 20,
    "push_changes": 50,
}
TODAY = GOALS
"""Where a figure is still above its goal, what it is; a change that shortens a way lowers its figure here."""


def test_no_way_becomes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    way = pytest.importorskip("benchmarks.house.way", reason="the benchmarks are not beside the package")
    monkeypatch.setattr("paceline.update.monitor.FOLD_S", float("inf"))  # else a slow machine writes a line of the log
    figures = dict.fromkeys(GOALS, 1_000_000)
    for _ in range(3):  # a wait that really blocks visits what a wait that is over already does not
        now = {key: value for name, one in way.measure().items() for key, value in one.figures(name).items()}
        figures = {name: min(least, now[name]) for name, least in figures.items()}
    longer = {name: figures[name] for name in GOALS if figures[name] > TODAY[name]}
    assert not longer, f"longer than { ({name: TODAY[name] for name in longer}) }"

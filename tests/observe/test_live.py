# SPDX-License-Identifier: Apache-2.0
"""The live view: the same numbers while the files still grow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.observe.reports.live import Live

Write = Callable[..., Path]


def test_the_numbers_follow_the_files(write_run: Write, tmp_path: Path) -> None:
    whole = write_run("whole", size=2)
    growing = tmp_path / "growing"
    growing.mkdir()
    live = Live(growing)
    rows = {name: (whole / name).read_text().splitlines(True) for name in
            ("rank-000.jsonl", "rank-001.jsonl")}  # fmt: skip
    for name, lines in rows.items():
        (growing / name).write_text("".join(lines[:23]))  # ten blocks
    shot = live.poll()
    assert shot.size == 2
    assert shot.rule == "bmuf(period=4)"
    assert shot.epoch == 1
    assert shot.minibatches == {0: 40, 1: 40}
    assert shot.epoch_done == pytest.approx(0.25)
    assert shot.minibatches_per_s == pytest.approx(2 * 4)  # four a second and worker
    assert shot.exchange_share == pytest.approx(0.2)
    for name, lines in rows.items():
        with (growing / name).open("a") as log:
            log.writelines(lines[23:])
    shot = live.poll()
    assert shot.total == 320
    assert shot.epoch_done == 1.0
    assert live.poll() == shot


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    line = json.dumps({"kind": "exchange", "at_s": 1.0, "rank": 0, "minibatches": 8, "total_minibatches": 8})
    log = tmp_path / "rank-000.jsonl"
    log.write_text("no event at all\n" + line[:30])
    live = Live(tmp_path)
    assert live.poll().total == 0
    log.write_text("no event at all\n" + line + "\n")
    assert live.poll().total == 8


@pytest.mark.parametrize(
    ("known", "start", "now"), [(92, 100, 150), (20, 20, 60)], ids=["the pass was finished", "the pass was left early"]
)
def test_an_epoch_begins_where_the_one_before_ended(tmp_path: Path, known: int, start: int, now: int) -> None:
    """Lines are folded, so the log is a little behind when a pass begins."""
    rows: list[dict[str, float | str]] = [{"kind": "epoch", "at_s": 0, "epoch": 0, "batches": 100}]
    line = {"kind": "exchange", "rank": 0}
    rows += [{**line, "at_s": i, "total_minibatches": known * i / 10} for i in range(1, 11)]
    rows.append({"kind": "epoch", "at_s": 11, "epoch": 1, "batches": 100})
    rows.append({**line, "at_s": 12, "total_minibatches": now})
    (tmp_path / "rank-000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shot = Live(tmp_path).poll()
    assert shot.epoch == 1
    assert shot.epoch_done == pytest.approx((now - start) / 100)

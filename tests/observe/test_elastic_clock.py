# SPDX-License-Identifier: Apache-2.0
"""The report of an elastic run: one clock, each worker from its own beginning, and nothing counted twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.observe import read_run
from paceline.observe.reports.log import RunLog
from paceline_plugins.report.curves import by_time, bytes_by_time
from paceline_plugins.report.tables import comparison, worker_rows
from paceline_plugins.report.totals import summarize, warnings

Event = dict[str, Any]
PERIOD, BATCH, BYTES = 4, 10, 100
HOUR = 3600.0
BEGAN = {0: 0.0, 1: 1.0, 2: 12.0}
"""When each log began, on the true clock. Worker 1 dies after second 8; worker 2 comes from a host an hour ahead."""
HOSTS = {0: ("a", 0.0), 1: ("a", 0.0), 2: ("b", HOUR)}


def loss(second: float) -> float:
    """Of all workers, at any moment of the true clock."""
    return 3.0 - 0.1 * second


def generations(rank: int) -> list[tuple[float, int, int]]:
    """(when on the true clock, number, size)."""
    found = [(1.5, 1, 2), (8.5, 2, 1), (13.5, 3, 2)]
    return {0: found, 1: found[:1], 2: found[2:]}[rank]


def events_of(rank: int, gives: int) -> list[Event]:
    """A block a second: from 2 to 20 worker 0, from 2 to 8 worker 1, from 14 to 20 worker 2, which inherits `gives`."""
    first, last = {0: (2, 20), 1: (2, 8), 2: (14, 20)}[rank]
    own = lambda second: round(second - BEGAN[rank], 6)  # noqa: E731
    host, ahead = HOSTS[rank]
    about = {"size": 2, "host": host, "rule": "bmuf(period=4)", "transport": "channel", "parameters": 7, "version": "1"}
    timed: list[tuple[float, Event]] = [
        (at, {"kind": "generation", "number": number, "size": size, "reason": "x"})
        for at, number, size in generations(rank)
    ]
    attach = BEGAN[rank] + 0.25
    timed.append((attach, {"kind": "attach", "unix_s": 1.7e9 + attach + ahead, **about}))
    for turn, second in enumerate(range(first, last + 1), start=1):
        counts = {"total_minibatches": gives + turn * PERIOD, "total_samples": turn * PERIOD * BATCH}
        timed.append((second, {"kind": "value", "name": "loss", "value": loss(second), **counts}))
        since = max(at for at, _, _ in generations(rank) if at < second)
        met = {"met": second - int(since), "met_s": own(second - 0.1)}  # exchanges are counted anew
        parts = {"compute_s": 0.8, "wait_s": 0.1, "exchange_s": 0.1, "bytes": BYTES, "block": second}
        line = {"kind": "exchange", "minibatches": PERIOD, "samples": PERIOD * BATCH, **counts, **parts, **met}
        timed.append((second, line))
    if rank != 1:
        timed.append((20.5, {"kind": "close", "minibatches": gives + (last - first + 1) * PERIOD, "bytes": 0}))
    timed.sort(key=lambda pair: pair[0])
    return [{**event, "at_s": own(second), "rank": rank} for second, event in timed]


CONTROL: list[tuple[float, Event]] = [
    (-1.5, {"kind": "began", "fewest": 1, "most": 3}),
    (-1.4, {"kind": "paused", "reason": "0 of at least 1 workers are there"}),
    (0.5, {"kind": "joined", "worker": 0, "host": "a"}),
    (0.5, {"kind": "resumed"}),
    (1.5, {"kind": "joined", "worker": 1, "host": "a"}),
    (1.5, {"kind": "generation", "number": 1, "members": [[0], [1]], "reason": "worker 1 joined"}),
    (1.6, {"kind": "holds", "worker": 1, "exchange": 0}),
    (8.5, {"kind": "lost", "worker": 1, "host": "a", "why": "its connection closed"}),
    (8.5, {"kind": "generation", "number": 2, "members": [[0]], "reason": "worker 1 was lost"}),
    (9.5, {"kind": "called", "worker": 0, "exchange": 12}),
    (13.5, {"kind": "joined", "worker": 2, "host": "b"}),
    (13.5, {"kind": "generation", "number": 3, "members": [[0], [2]], "reason": "worker 2 joined"}),
    (20.5, {"kind": "left", "worker": 0, "host": "a"}),
    (20.5, {"kind": "left", "worker": 2, "host": "b"}),
]
LAUNCHED = -7.0  # where the clock of the control plane is 0


@pytest.fixture
def run(tmp_path: Path) -> RunLog:
    folder = tmp_path / "log"
    folder.mkdir()
    for rank in range(3):
        rows = events_of(rank, gives=48 if rank == 2 else 0)
        (folder / f"rank-{rank:03d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = [{**event, "at_s": at - LAUNCHED} for at, event in CONTROL]
    (folder / "control.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    return read_run(folder)


BLOCKS = {0: 19, 1: 7, 2: 7}


def test_the_totals_are_those_of_the_run(run: RunLog) -> None:
    numbers = summarize(run)
    assert [worker.minibatches for worker in run.workers] == [PERIOD * count for count in BLOCKS.values()]
    assert (numbers.minibatches, numbers.samples) == (33 * PERIOD, 33 * PERIOD * BATCH)
    assert (numbers.workers, numbers.in_all, run.missing) == (2, 3, [])
    assert numbers.wall_s == pytest.approx(20.5)
    assert numbers.minibatches_per_s == pytest.approx(33 * PERIOD / 20.5)
    assert numbers.shares.compute == pytest.approx(0.8)
    assert numbers.values["loss"] == pytest.approx(loss(20))  # worker 1 was lost long before


def test_curves_lie_on_one_clock(run: RunLog) -> None:
    curve = by_time(run, "loss")
    assert curve.x[-1] == pytest.approx(20) and np.all(np.diff(curve.x) >= 0)
    assert curve.y == pytest.approx([loss(x) for x in curve.x])
    sent = bytes_by_time(run)
    assert np.interp([8.5, 13.5, 20], sent.x, sent.y) == pytest.approx([BYTES * n for n in (14.5, 19.5, 33)])


def test_the_lost_worker_is_told_and_the_table_says_who_joined_when(run: RunLog) -> None:
    assert warnings(run) == [
        "Worker 1 was lost after 8.5 s: its connection closed. What worker 1 printed is in log/output."
    ]
    rows = worker_rows(run)
    assert [row["joined after"] for row in rows] == ["0 s", "1 s", "12 s"]
    assert [row["end"] for row in rows] == ["closed", "lost", "closed"]
    assert comparison([run])[0]["workers"] == "2 at most, 3 in all"


@pytest.mark.parametrize("gone", ["met", "met and generation"])
def test_what_ties_logs_together_where_exchanges_do_not(run: RunLog, gone: str) -> None:
    """Generations do; and where there are none in common, the clocks of the hosts, which are all that is known."""
    path = run.directory / "rank-002.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row.pop("met", None)
        if gone != "met" and row["kind"] == "generation":
            row["number"] = 9
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    began = [worker.began_s for worker in read_run(run.directory).workers]
    assert began == pytest.approx([0.0, 1.0, 12.0 if gone == "met" else 12.0 + HOUR])


def test_a_resumed_run_counts_what_it_did_itself(run: RunLog, tmp_path: Path) -> None:
    """The count of a resumed worker begins with that of the checkpoint; so it is when a worker goes back."""
    folder = tmp_path / "resumed"
    folder.mkdir()
    rows: list[Event] = [{"kind": "attach", "at_s": 0.0, "size": 1, "rank": 0}]
    for at_s, total in ((1.0, 1004), (2.0, 1008), (3.0, 504), (4.0, 508)):
        rows.append({"kind": "exchange", "at_s": at_s, "minibatches": 4, "total_minibatches": total, "rank": 0})
    rows.append({"kind": "close", "at_s": 5.0, "minibatches": 508, "rank": 0})
    (folder / "rank-000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = summarize(read_run(folder))
    assert (numbers.minibatches, numbers.minibatches_per_s) == (16, 16 / 5)

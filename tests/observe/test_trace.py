# SPDX-License-Identifier: Apache-2.0
"""The timeline: what the trace event format asks for, every worker on one clock, and how well that clock was set."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.observe.reports.read import read_runs
from paceline.update.monitor import LogLine
from paceline_plugins.report.trace import align_clocks, write_trace

from .conftest import BLOCKS, Event, waiting

Write = Callable[..., Path]
PHASES = {"X": {"name", "ts", "dur", "pid", "tid"}, "i": {"name", "ts", "pid", "tid", "s"},
          "M": {"name", "pid", "tid", "args"}, "C": {"name", "ts", "pid", "args"}}  # fmt: skip


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, after the rules of the format."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    whole = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert isinstance(whole["traceEvents"], list) and whole["displayTimeUnit"] in ("ms", "ns")
    spans: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in whole["traceEvents"]:
        assert PHASES[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0, event
        if event["ph"] == "X":
            assert event["dur"] >= 0
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    for own in spans.values():
        own.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(own)), "spans overlap"
    named = {(e["pid"], e["tid"]) for e in whole["traceEvents"] if e["name"] == "thread_name"}
    assert spans.keys() <= named
    found: list[dict[str, Any]] = whole["traceEvents"]
    return found


def seconds(events: list[dict[str, Any]], name: str, pid: int) -> float:
    return sum(e["dur"] for e in events if e["ph"] == "X" and e["name"] == name and e["pid"] == pid) / 1e6


def test_every_worker_is_there_with_all_its_time(write_run: Write, tmp_path: Path) -> None:
    trace = write_trace(write_run(size=3, change=waiting), tmp_path / "trace.json")
    events = events_of(trace.path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "worker 0 on host-0", 1: "worker 1 on host-0", 2: "worker 2 on host-1"}
    for pid in names:
        assert [round(seconds(events, part, pid), 3) for part in ("wait", "exchange")] == [6.0, 2.0]
    assert round(seconds(events, "data", 0), 3) == 8.0 and round(seconds(events, "data", 1), 3) == 12.0
    assert (trace.workers, trace.slices, trace.folded) == (3, 3 * 4 * BLOCKS, 1)
    assert sum(e["ph"] == "C" and e["name"] == "loss" for e in events) == 3 * BLOCKS


def test_a_part_of_a_run_compressed(write_run: Write, tmp_path: Path) -> None:
    directory = write_run()
    result = CliRunner().invoke(app, ["trace", str(directory), "-o", str(tmp_path / "t.json.gz")])
    assert result.exit_code == 0 and "2 workers" in result.output, result.output
    write_trace(directory, tmp_path / "t.json.gz", since_s=10, until_s=20.5)
    spans = [e for e in events_of(tmp_path / "t.json.gz") if e["ph"] == "X"]
    assert min(e["ts"] for e in spans) >= 10e6 and max(e["ts"] for e in spans) <= 20.5e6
    assert {e["args"]["block"] for e in spans} == set(range(11, 22))


def test_long_logs_are_drawn_coarser(write_run: Write, tmp_path: Path) -> None:
    trace = write_trace(write_run(), tmp_path / "t.json", most=20)
    events = events_of(trace.path)
    assert trace.folded == 4 and trace.slices == 2 * 3 * BLOCKS // 4
    assert round(seconds(events, "compute", 1), 3) == 32.0


def wrong_clocks(rank: int, events: list[Event]) -> list[Event]:
    """Host 1 is 3 s ahead and gains 100 ppm; all come to each block within a millisecond; lines name some of them."""
    noise, ahead = random.Random(rank), rank >= 2
    for event in events:
        if event["kind"] == "attach" and ahead:
            event["unix_s"] += 3.0
        if event["kind"] == "exchange":
            event["met"] = event["block"]
            event["met_s"] = (event["at_s"] + noise.uniform(0, 0.001)) * (1.0001 if ahead else 1.0)
        event["at_s"] *= 1.0001 if ahead else 1.0
    return events


def test_clocks_that_differ_are_put_right(write_run: Write) -> None:
    runs = read_runs(write_run(size=4, change=wrong_clocks))
    clocks, (first, *_, last) = align_clocks(runs), runs[0].workers
    for line, other in zip(first.exchanges, last.exchanges, strict=True):
        assert abs(clocks.common(first, line.at_s) - clocks.common(last, other.at_s)) < 0.002
    assert clocks.exchanges == {"host-1": BLOCKS} and clocks.error_s["host-1"] < 0.002
    assert clocks.text.startswith(f"the clocks of 2 hosts were set by {BLOCKS} exchanges or more")


def test_lines_that_end_elsewhere_still_name_the_same_exchanges() -> None:
    named = []
    for seed in (1, 2):
        noise, sums, met = random.Random(seed), LogLine(), set()
        for number in range(1, 2001):
            sums.meets(number, float(number))
            if noise.random() < 0.05:
                assert sums.met is not None and sums.met[1] == sums.met[0]
                met.add(sums.met[0])
                sums = LogLine()
        named.append(met)
    assert len(named[0] & named[1]) > 0.4 * len(named[0])

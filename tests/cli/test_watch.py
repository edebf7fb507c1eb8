# SPDX-License-Identifier: Apache-2.0
"""`paceline watch`: what stands on the page of a run that is under way, over, or not to be found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.observe.event_log import this_process


def call(*arguments: object, columns: int = 140) -> Result:
    return CliRunner().invoke(app, ["watch", *map(str, arguments)], env={"COLUMNS": str(columns)})


def write(directory: Path, rank: int, *events: dict[str, Any], size: int = 2, closed: bool = True) -> Path:
    """A worker's log: ten exchanges, one a second, with a loss that falls from 3 to 1, and what else is given."""
    directory.mkdir(exist_ok=True, parents=True)
    rows: list[dict[str, Any]] = [
        {"kind": "attach", "at_s": 0.0, "size": size, "host": f"host-{rank}", "rule": "bmuf(period=4)", "unix_s": 1e9}
    ]
    for k in range(1, 11):
        stamp = {"at_s": float(k), "total_minibatches": 4 * k, "total_samples": 128 * k}
        rows.append({"kind": "value", "name": "loss", "value": 3.2 - 0.2 * k, **stamp})
        times = {"compute_s": 0.5, "wait_s": 0.3, "exchange_s": 0.1, "data_s": 0.1}
        rows.append({"kind": "exchange", "block": k, "minibatches": 4, "bytes": 9, **stamp, **times})
    rows += [*events, *([{"kind": "close", "at_s": 11.0, "minibatches": 40}] if closed else [])]
    path = directory / f"rank-{rank:03d}.jsonl"
    path.write_text("".join(json.dumps({"rank": rank, **row}) + "\n" for row in rows))
    return path


OUT = {"kind": "left_out", "at_s": 7.5, "rank_left_out": 1, "exchange": 8, "finite": True, "why": "norm 12 is much"}


def test_a_finished_run_is_shown_once(tmp_path: Path) -> None:
    line = {"kind": "exchange", "at_s": 10.0, "block": 10, "left_out": [1], "total_minibatches": 40}
    for rank in range(2):
        save = {"kind": "save", "at_s": 9.0, "path": "/kept"}
        write(tmp_path / "run", rank, {**OUT, "at_s": 7.5 + rank}, {**OUT, "exchange": 9, "in_a_row": 3}, line, save)
    result = call(tmp_path / "run")
    assert result.exit_code == 0
    text = result.stdout
    assert "bmuf(period=4) | block 10 | after 11 s" in text
    assert "loss 3.0000 to 1.2000 █▇▆▆▅▄▃▃▂▁" in text
    rows = [line.split() for line in text.splitlines() if " host-" in line]
    assert rows[0] == ["0", "host-0", "closed", "40", "128", "10", "%", "30", "%", "10", "%", "0"]
    assert rows[1] == ["1", "host-1", "closed", "40", "128", "10", "%", "30", "%", "10", "%", "1"]
    assert text.count("worker 1's contribution was rejected in exchange 8: norm 12 is much") == 1  # both tell of it
    assert "exchange 9: norm 12 is much (3 in a row: probably broken)" in text
    assert text.count("saved /kept") == 1


@pytest.mark.parametrize("columns", [40, 80, 140])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, columns: int) -> None:
    lost = {"kind": "lost", "at_s": 5.0, "rank_lost": 2, "why": "its connection was reset by something " * 4}
    for rank in (0, 1, 3):
        write(tmp_path, rank, lost, size=4, closed=False)
    write(tmp_path, 2, size=4, closed=False)
    text = call(tmp_path, "--once", columns=columns).stdout
    assert max(map(len, text.splitlines())) <= columns
    rows = [line.split() for line in text.splitlines() if line.strip()[:2] in ("0 ", "1 ", "2 ", "3 ")]
    rows = [[word for word in row if not word.startswith("host-")] for row in rows]
    assert [row[:2] for row in rows] == [["0", "at"], ["1", "at"], ["2", "lost"], ["3", "at"]]  # `at work`
    assert "worker 2 is lost: its connection was reset" in " ".join(text.split())


def test_who_left_no_log_or_failed_or_fell_silent_is_told_apart(tmp_path: Path) -> None:
    os.utime(write(tmp_path, 0, size=3, closed=False), (1e9, 1e9))
    write(tmp_path, 1, {"kind": "error", "at_s": 8.0, "message": "ValueError: odd\nand more"}, size=3)
    text = call(tmp_path, "--once").stdout
    states = {line.split()[0]: line for line in text.splitlines() if line.strip()[:2] in ("0 ", "1 ", "2 ")}
    assert "silent" in states["0"] and " ago" in states["0"]
    assert "failed" in states["1"] and "no log" in states["2"]
    assert "ValueError: odd" in text


def test_the_control_plane_is_heard(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, closed=False)
    control = [
        {"kind": "paused", "at_s": 0.5, "reason": "0 of at least 1 workers are there"},
        {"kind": "joined", "at_s": 1.0, "worker": 7},
        {"kind": "generation", "at_s": 1.0, "number": 1, "members": [[0], [1]], "reason": "worker 1 joined"},
        {"kind": "called", "at_s": 2.0, "worker": 1, "exchange": 12},
        {"kind": "lost", "at_s": 3.0, "worker": 1, "why": "its connection closed"},
        {"kind": "paused", "at_s": 4.0, "reason": "too few"},
    ]
    (tmp_path / "control.jsonl").write_text("".join(json.dumps(row) + "\n" for row in control) + '{"kind": "tor')
    (tmp_path / "rank-001.2.jsonl").write_text((tmp_path / "rank-001.jsonl").read_text())  # it came again
    text = call(tmp_path, "--once").stdout
    assert "worker 7 has joined" in text and "the run waits: too few" in text
    assert "called to exchange" not in text and "0 of at least 1" not in text
    rows = [line.split() for line in text.splitlines() if " host-" in line]
    assert [row[2] for row in rows] == ["at", "lost"]  # `at work`


@pytest.mark.parametrize(("path", "says"), [("gone", "does not exist"), ("file", "is a file"), ("", "no run has logs")])
def test_where_there_is_no_run(tmp_path: Path, path: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("paceline.cli.watch.WAIT_S", 0.0)
    for how in (["--once"], []):
        result = call(tmp_path / path, *how)
        assert result.exit_code == 2 and says in " ".join(result.stderr.split())


@pytest.mark.processes
def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "watch", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "no run logs in" in process.stderr.readline()
        made = tmp_path / "made"
        for rank in range(2):
            write(made, rank)
        made.rename(tmp_path / "run")
        said = process.stdout.read()
        assert process.wait(60) == 0
    assert "| 8 minibatches/s |" in said


def test_a_worker_whose_process_is_gone_is_dead_and_ends_the_watch(tmp_path: Path) -> None:
    about = this_process()
    here, gone = {"host": socket.gethostname(), **about}, {"host": socket.gethostname(), **about, "began": 1}
    for rank, process in enumerate((gone, {**gone, "host": "elsewhere"}, here, {**gone, "space": "another"})):
        path = write(tmp_path, rank, size=4, closed=False)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(
            "".join(json.dumps({**row, **process} if row["kind"] == "attach" else row) + "\n" for row in rows)
        )
        os.utime(path, (1e9, 1e9))
    text = call(tmp_path, "--once").stdout
    states = [line.split()[2] for line in text.splitlines() if line.strip()[:2] in ("0 ", "1 ", "2 ", "3 ")]
    assert states == ["dead", "silent", "silent", "silent"]
    for rank in (1, 2, 3):
        write(tmp_path, rank, size=4)
    assert call(tmp_path).exit_code == 0  # it comes to its end: nobody is at work any more


def close(directory: Path) -> None:
    """Both workers come to their end."""
    for rank in range(2):
        with (directory / f"rank-{rank:03d}.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "close", "at_s": 11.0, "rank": rank, "minibatches": 40}) + "\n")

# SPDX-License-Identifier: Apache-2.0
"""A log whose disk is full, or whose directory is gone: one warning, whole lines, and on when there is room."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import UnsupportedError
from paceline.observe import event_file
from paceline.observe.event_file import EventFile
from paceline.observe.event_log import EventLog
from paceline.observe.reports.read import read_worker

Fill = Callable[[int | None], None]


@pytest.fixture
def limit() -> Iterator[Fill]:
    """No file may grow beyond so many bytes, as on a disk that is full then; None: there is room again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_to(count: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if count is None else count, before[1]))

    yield set_to
    set_to(None)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file, "RETRY_S", 0.0)


def numbers(path: Path) -> list[int]:
    return [event["number"] for event in map(json.loads, path.read_text().splitlines()) if "number" in event]


def write(journal: EventLog, numbers: range) -> None:
    for number in numbers:
        journal.write("resume", number=number)  # an event that is written at once


def test_a_full_disk_is_one_warning_and_nothing_is_lost(
    tmp_path: Path, limit: Fill, caplog: pytest.LogCaptureFixture
) -> None:
    journal = EventLog(tmp_path, 3)
    write(journal, range(10))
    assert journal.path is not None
    full = journal.path.stat().st_size + 20  # within the next line
    limit(full)
    write(journal, range(10, 200))
    assert numbers(journal.path) == list(range(10))  # whole lines only, though there was room for a part of one
    limit(None)
    write(journal, range(200, 210))
    journal.close()
    assert numbers(journal.path) == list(range(210))
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "worker 3" in warnings[0] and str(tmp_path) in warnings[0]
    assert not read_worker(journal.path).truncated


def test_memory_is_bounded_and_the_gap_is_told(tmp_path: Path, limit: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file, "WAITING_BYTES", 2000)
    journal = EventLog(tmp_path, 0)
    write(journal, range(3))
    assert journal.path is not None
    limit(journal.path.stat().st_size)
    write(journal, range(3, 500))
    limit(None)
    journal.close()
    kept = numbers(journal.path)
    assert kept[:3] == [0, 1, 2] and kept[-1] == 499 and kept[3:] == list(range(kept[3], 500))
    assert read_worker(journal.path).gaps == kept[3] - 3 > 0


def test_a_directory_that_cannot_be_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedError, match=r"no event log can be written in .*file.*: .*give another directory"):
        EventLog(tmp_path / "file" / "log", 0)


def test_a_line_that_a_killed_writer_left_half_is_closed_first(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(b'{"kind": "whole"}\n{"kind": "ha')

    def opener() -> tuple[int, Path]:
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), path

    file = EventFile(opener, "a file")
    file.add('{"kind": "next"}')
    file.close()
    assert path.read_bytes() == b'{"kind": "whole"}\n{"kind": "ha\n{"kind": "next"}\n'


@pytest.mark.processes
def test_what_is_printed_on_a_full_disk_ends_no_program(tmp_path: Path) -> None:
    program = """
import os, resource, sys
from paceline.observe.standard_streams import tolerate_full_disk
before = resource.getrlimit(resource.RLIMIT_FSIZE)
tolerate_full_disk()
print("one")
sys.stdout.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
for number in range(3):
    print("line", number, flush=True)
    sys.stderr.write("a word\\n")
sys.stdout.buffer.write(b"bytes\\n")
sys.stdout.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, before)
print("end")
"""
    for flags in ([], ["-u"]):
        out, err = tmp_path / "out", tmp_path / "err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            subprocess.run(
                [sys.executable, *flags, "-c", program], stdout=stdout, stderr=stderr, check=True, timeout=60
            )
        assert out.read_text() == "one\nline 0\nline 1\nline 2\nbytes\nend\n"

# SPDX-License-Identifier: Apache-2.0
"""The record of an elastic run's launcher, and its lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import CheckpointError, UnsupportedError
from paceline.flow.lock import Lock
from paceline_plugins.sites import saved_plan

PLAN = saved_plan.SavedPlan(["python", "x.py"], {"A": "b"}, "/", 3, ("::1", 7000), True, (2, 8), 60.0, None, None, 12.5)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    places = [{"place": 0, "turn": 2}]
    saved_plan.write(tmp_path, PLAN, places)
    assert saved_plan.read(tmp_path) == (PLAN, places)
    assert [path.name for path in tmp_path.iterdir()] == [saved_plan.NAME]
    assert PLAN.address == "[::1]:7000"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "only an elastic run can be resumed"),
        ("", "is no record of an elastic run"),
        ("[]", "is no record of an elastic run"),
        ('{"version": 0}', "version 0, wanted 1"),
        ('{"version": 1, "plan": {"control": [], "bounds": []}, "places": []}', "is no record"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / saved_plan.NAME).write_text(text)
    with pytest.raises(CheckpointError, match=says):
        saved_plan.read(tmp_path)


def test_there_is_one_launcher(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    with pytest.raises(UnsupportedError, match=r"still runs \(process \d+\)"):
        Lock(tmp_path)
    lock.close()
    Lock(tmp_path).close()


@pytest.mark.processes
def test_a_killed_launcher_leaves_no_lock(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from paceline.flow.lock import Lock
lock = Lock(Path({str(tmp_path)!r}))
os.kill(os.getpid(), 9)
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONPATH": str(Path(saved_plan.__file__).parents[2])}
        ).returncode
        == -9
    )
    Lock(tmp_path).close()

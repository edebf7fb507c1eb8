# SPDX-License-Identifier: Apache-2.0
"""Every way out of a program in the middle of a pass, on real processes: exit codes, and who is named."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.processes.exit_programs import WAYS
from tests.processes.launch import Ended, Launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

TOGETHER, DOORS = ["sync", "bmuf(period=3)"], ["two", "zero"]
CODES = {"exit3": 3, "exit_text": 1, "quit3": 3, "system_exit3": 3, "os_exit3": 3, "error": 1, "os_exit0": 0}
"""Exit codes of a worker that leaves, where they are its own."""
ABANDONS = {"two": {"thread_exit3"}, "zero": set()}
"""Ways in which a worker leaves at once, beside those."""


SAME = {"exit_text", "quit", "quit3", "system_exit0", "thread_exit0"}
"""Ways that differ from another one in the exit code, or in the name of the same exception, alone."""


def in_turn(ways: Iterable[str]) -> list[tuple[str, str, str]]:
    """Each way under one door and rule, and the doors and rules in turn."""
    return [(way, DOORS[k % 2], TOGETHER[k // 2 % 2]) for k, way in enumerate(ways)]


def leave(directory: Path, door: str, rule: str, way: str, who: str) -> dict[int, Ended]:
    with Launch(door, 2, directory, rule, way, who, module="exit_programs") as launch:
        return launch.wait()


@pytest.mark.parametrize(
    ("way", "door", "rule"), [*in_turn(way for way in WAYS if way not in SAME), ("system_exit3", "zero", "sync")]
)
def test_one_worker_leaves(tmp_path: Path, door: str, way: str, rule: str) -> None:
    ended = leave(tmp_path, door, rule, way, "1")
    told = ended[0].err + ended[1].err
    assert ended[0].code == (0 if way == "generator" else 1), told
    named = [line for line in ended[0].err.splitlines() if "rank 1" in line]
    assert any("Error: " in line or line.startswith("rank 1") for line in named), told
    unseen = door == "two" and way == "system_exit3"  # nothing tells an interpreter's end of it
    if way in CODES:
        assert ended[1].code == (1 if unseen else CODES[way]), told
    elif way not in ABANDONS[door]:
        assert any("left pass 1 over its data after" in line for line in named), told


@pytest.mark.parametrize(("way", "door", "rule"), in_turn(["exit0", "break", "interrupt", "thread_exit0"]))
def test_all_workers_leave(tmp_path: Path, door: str, way: str, rule: str) -> None:
    ended = leave(tmp_path, door, rule, way, "all")
    for one in ended.values():
        assert one.code == 0 and "pass" not in one.err.replace("passed", ""), one.err


@pytest.mark.parametrize(("way", "door"), [("exit3", "zero"), ("os_exit3", "two"), ("break", "zero")])
def test_one_worker_leaves_an_asynchronous_run(tmp_path: Path, door: str, way: str) -> None:
    """The others train on its samples."""
    ended = leave(tmp_path, door, "asgd", way, "1")
    assert ended[0].code == 0, ended[0].err
    missed = door == "zero" and way not in CODES  # zero lines merge after each pass, and it does not come
    assert ended[1].code == (1 if missed else CODES.get(way, 0)), ended[1].err
    assert not missed or "the other workers went on without this one" in ended[1].err
    if ended[1].code:
        assert "rank 1" in ended[0].err and "is lost" in ended[0].err


@pytest.mark.parametrize(("rule", "door"), [("sync", "two"), ("bmuf(period=3)", "zero"), ("asgd", "zero")])
def test_batches_that_a_thread_reads_ahead_are_refused(tmp_path: Path, door: str, rule: str) -> None:
    for one in leave(tmp_path, door, rule, "reads_ahead", "none").values():
        assert one.code == 1
        assert "UnsupportedError: the thread reader reads the training data ahead" in one.err, one.err


@pytest.mark.parametrize(
    ("rule", "way", "door"), [("bmuf(period=3)", "kept_error", "two"), ("asgd", "kept_exit3", "zero")]
)
def test_nothing_runs_in_what_the_garbage_collector_drops_at_the_end(
    tmp_path: Path, door: str, way: str, rule: str
) -> None:
    """torch aborts a process that works with tensors within a collection which drops them."""
    for one in leave(tmp_path, door, rule, way, "all").values():
        assert one.code == CODES[way.removeprefix("kept_")], one.err
        assert "ASSERT" not in one.err

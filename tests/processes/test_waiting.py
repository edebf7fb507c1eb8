# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom, on real processes: one hangs, one waits elsewhere, one is stopped, one is dead."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.processes.launch import Launch, run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def test_everybody_is_named_with_what_it_does(tmp_path: Path) -> None:
    with Launch("apart", 5, tmp_path, module="waiting_programs") as launch:
        for rank in range(1, 5):
            launch.until(f"there.{rank}")
        os.killpg(launch.processes[3].pid, signal.SIGSTOP)
        os.killpg(launch.processes[4].pid, signal.SIGKILL)
        ended = launch.wait([0, 2])
    assert all(one.code != 0 for one in ended.values())
    text = (tmp_path / "error.0").read_text()
    first, *lines = text.splitlines()
    assert re.search(r"rank 3 on \S+, rank 4 on \S+ did not answer", first) and first.endswith("]"), text
    said = {int(line.split()[1]): line for line in lines}
    assert list(said)[:3] == [3, 4, 1] and sorted(said) == [0, 1, 2, 3, 4], text  # those first that others wait for
    assert said[3].endswith("does not answer: dead, stopped or cut off")
    assert said[4].endswith("does not answer: dead, stopped or cut off")
    assert re.search(r"has not come: .* is at waiting_programs.py:\d+ hang_here", said[1]), text
    assert re.search(r"waits for receive from rank 0 on \S+, operation \d+, since \d+\.\d s \(.*:\d+ apart\)", said[2])
    assert re.search(r"waits for \w+, operation \d+, since .* s \(waiting_programs.py:\d+ apart\)", said[0]), text
    for rank in (0, 2):  # in the event log as well
        lines = (tmp_path / "log" / f"rank-{rank:03d}.jsonl").read_text().splitlines()
        (event,) = [e for e in map(json.loads, lines) if e["kind"] == "waiting"]
        states = {row["rank"]: row["state"] for row in event["workers"]}
        assert states == {0: "waits", 1: "busy", 2: "waits", 3: "silent", 4: "silent"}


def test_witnesses_leave_with_their_connection(tmp_path: Path) -> None:
    run("leaves", 2, tmp_path, module="waiting_programs")


def test_calls_of_rank_0_alone_end_with_a_sentence_on_both(tmp_path: Path) -> None:
    for ended in run("elsewhere", 2, tmp_path, module="waiting_programs").values():
        assert ended.code == 0 and "terminate" not in ended.err, ended
    for rank in range(2):
        said = (tmp_path / f"said.{rank}").read_text().splitlines()
        assert len(said) == 11
        for line in said:
            name = line.split(": ")[0].split()[-1]
            assert f"rank 0 on {socket.gethostname()} in {name}(" in line and "rank 1 on " in line, line
            assert "optimizer.step()" in line and "take it out of `if run.world.rank == 0:`" in line, line

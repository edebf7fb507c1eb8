# SPDX-License-Identifier: Apache-2.0
"""Workers of tools that are killed: who is named, who goes on, and which samples enter the model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from c_helpers import DEADLINE_S, compiled, environment

LOST = 3
"""What `paceline run` ends with where workers were lost and the others have finished."""
SAMPLES, EPOCHS, BATCH, PERIOD = 800, 2, 4, 4


def launched(*command: object) -> list[str]:
    """`paceline run` with these words."""
    return [sys.executable, "-m", "paceline", "run", *map(str, command)]


def trained(folder: Path) -> dict[int, list[list[int]]]:
    """The (epoch, begin, end) of each process, by its place; of the first process at that place."""
    found: dict[int, list[list[int]]] = {}
    for path in sorted(folder.glob("ranges.*"), key=lambda path: path.stat().st_mtime_ns):
        rows = [list(map(int, line.split())) for line in path.read_text().splitlines()]
        found.setdefault(int(path.name.split(".")[1]), []).extend(rows)
    return found


def samples(rows: list[list[int]]) -> Counter[tuple[int, int]]:
    """How often each (epoch, sample) is in the ranges."""
    return Counter((epoch, k) for epoch, begin, end in rows for k in range(begin, end))


@pytest.mark.slow  # test_c_example.py kills one
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rule", "workers", "kills"),
    [("asgd(period=8)", 3, [1, 19]), pytest.param("asgd(period=8)", 4, [1, 19, 3, -16], marks=pytest.mark.slow)],
)
def test_asynchronous_workers_go_on_without_those_killed(
    prefix: Path, tmp_path: Path, rule: str, workers: int, kills: list[int]
) -> None:
    """Worker 3 of 4 owns the model and the ledger of samples. Every sample of every epoch is in the model once; where
    eight batches went into one push and others push them again, the run says how many are in it twice."""
    tool = compiled(prefix, "counting.c", tmp_path)
    command = launched("--workers", workers, "--rule", rule, "--timeout", 60, "--log", tmp_path / "log")
    done = subprocess.run(
        [*command, tool, tmp_path, str(SAMPLES), str(EPOCHS), "0", *map(str, kills)],
        env=environment(COLUMNS="200"), capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == LOST, done.stdout + done.stderr
    gone = kills[::2]
    assert f"{workers - len(gone)} workers finished here" in done.stderr
    assert f"without {', '.join(map(str, gone))}" in done.stderr
    for rank in gone:
        assert re.search(rf"worker {rank} on \S+ was lost; the other workers continued", done.stderr), done.stderr
    assert "killed by SIGKILL (9)" in done.stderr
    ended = re.findall(r"ended: \d+ steps, (\d+) numbers wrong, (\d+) samples too many", done.stdout)
    assert len(ended) == workers - len(gone) and len(set(ended)) == 1, done.stdout
    wrong, excess = map(int, ended[0])
    batches = sum(map(int, re.findall(r"not exactly once: (\d+) ", done.stderr)))
    assert excess == BATCH * batches and (wrong == 0) == (excess == 0), done.stderr
    rows = trained(tmp_path)
    living = samples([row for rank, found in rows.items() if rank not in gone for row in found])
    assert max(living.values()) == 1, "no two workers that lived trained on the same sample"
    everything = {(epoch, k) for epoch in range(EPOCHS) for k in range(SAMPLES)}
    assert everything == living.keys() | samples([row for rank in gone for row in rows[rank]]).keys()


@pytest.mark.slow  # tests/cli/test_elastic.py has the same in Python
@pytest.mark.timeout(300)
def test_a_killed_worker_of_an_elastic_run_is_replaced(prefix: Path, tmp_path: Path) -> None:
    """It had exchanged two blocks, and was in the third; what it had of that another worker makes again."""
    killed, step, log = 1, 2 * PERIOD + 2, tmp_path / "log"
    tool = compiled(prefix, "counting.c", tmp_path)
    command = launched("--elastic", "1:3", "--workers", 3, "--rule", f"bmuf(period={PERIOD})", "--log", log)
    words = [tool, tmp_path, SAMPLES, EPOCHS, 5 * PERIOD, killed, step]
    with subprocess.Popen(
        [*command, *map(str, words)],
        env=environment(COLUMNS="200"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            joined(log, 4, process)
            (tmp_path / "go").touch()  # the others wait, so that there is something left to do
            out, errors = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 0, out + errors
    assert f"[{killed}] this worker is lost: killed by SIGKILL (9); a new one replaces it" in errors
    assert f"lost during the run: [{killed}] killed by SIGKILL (9)" in errors and "3 workers finished" in errors
    rows = trained(tmp_path)
    before, after = rows[killed][:step], rows[killed][step:]
    assert after, "the new one has trained, too"
    in_the_model = [*before[: 2 * PERIOD], *after, *rows[0], *rows[2]]
    assert samples(in_the_model) == {(epoch, k): 1 for epoch in range(EPOCHS) for k in range(SAMPLES)}
    assert not samples(before[2 * PERIOD :]) - samples([*after, *rows[0], *rows[2]])


def joined(log: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until so many workers have joined."""
    end = time.monotonic() + DEADLINE_S
    while True:
        path = log / "control.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        if sum(json.loads(line)["kind"] == "joined" for line in lines) >= count:
            return
        assert process.poll() is None and time.monotonic() < end, lines
        time.sleep(0.05)

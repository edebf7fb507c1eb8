# SPDX-License-Identifier: Apache-2.0
"""Every sample of every epoch enters the model exactly once, on real processes that are killed, leave and come.

Deaths are SIGKILLs at given minibatches. Under asynchronous rules the others go on; under rules by which workers go on
evenly the run ends with an error, and goes on from its last checkpoint with fewer or more workers.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nursery import ROOT, surroundings

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

Stage = tuple[int, dict[str, Any]]
PAUSES = [0.001, 0.002, 0.0035, 0.005]  # seconds for a minibatch
KEEPER = 6  # of 7: 64 numbers are one piece, which the last worker owns, and with it the ledger


def carry_out(stages: list[Stage], directory: Path) -> list[list[tuple[int, str]]]:
    """(exit status, output) of each worker of each stage."""
    for _, stage in stages:
        for key in ("save", "resume"):
            if key in stage:
                stage[key] = str(directory / stage[key])
    (directory / "stages.json").write_text(json.dumps(stages))
    command = [sys.executable, "-m", "tests.processes.forked", "stages.json", "."]
    subprocess.run(command, cwd=directory, env=surroundings(), check=True, timeout=280)
    return [[(code, said) for code, said in stage] for stage in json.loads((directory / "ended.json").read_text())]


def verdicts(ended: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """What the workers of a stage that came to its end found in their models."""
    lines = [line for _, said in ended for line in said.splitlines() if line.startswith("ENDED")]
    return [json.loads(line.removeprefix("ENDED")) for line in lines]


def assert_exact(ended: list[tuple[int, str]], living: int) -> None:
    found = verdicts(ended)
    assert len(found) == living, ended
    assert all(one["wrong"] == 0 for one in found), found


def assert_killed(ended: list[tuple[int, str]], killed: dict[str, Any], others: set[int]) -> None:
    for rank, (code, said) in enumerate(ended):
        assert code in ({-signal.SIGKILL} if str(rank) in killed else others), (rank, code, said)


@pytest.mark.parametrize(
    ("rule", "loaders"),
    [
        pytest.param("asgd", 0, marks=pytest.mark.slow),
        pytest.param("asgd", 1, marks=pytest.mark.slow),
        pytest.param("asgd(period=3)", 0, marks=pytest.mark.slow),
        pytest.param("ssp(staleness=2)", 0, marks=pytest.mark.slow),
    ],
)
def test_where_workers_go_on_unevenly(rule: str, loaders: int, tmp_path: Path) -> None:
    """Two of four are lost; four save, three go on and save, and four and seven after them."""
    stage = {"rule": rule, "loaders": loaders, "pauses": PAUSES, "samples": 800}  # so that a late worker gets some, too
    four, seven = {"1": [6, "before"], "3": [4, "after"]}, {str(KEEPER): [4, "before"], "2": [2, "after"]}
    stages = [
        (4, {**stage, "kills": four}),
        (4, {**stage, "stop": 11, "save": "four"}),
        (3, {**stage, "resume": "four", "stop": 14, "save": "three"}),
        (4, {**stage, "resume": "three"}),
        (7, {**stage, "resume": "three", "kills": seven}),
    ]
    killed, saved, resumed, joined, grown = carry_out(stages, tmp_path)
    assert_killed(killed, four, {0})
    assert_exact(killed, living=2)
    assert all(code == 0 for code, _ in saved + resumed), saved + resumed
    assert_exact(joined, living=4)
    assert_killed(grown, seven, {0})
    assert_exact(grown, living=5)


@pytest.mark.slow  # test_under_the_launcher counts the same
@pytest.mark.parametrize(
    ("rule", "loaders"),
    [
        ("sync", 0),
        pytest.param("sync", 1, marks=pytest.mark.slow),
        pytest.param("bmuf(period=3)", 0, marks=pytest.mark.slow),
        pytest.param("bmuf(period=3, momentum=0.0, lr=1.0)", 0, marks=pytest.mark.slow),
    ],
)
def test_where_workers_go_on_evenly(rule: str, loaders: int, tmp_path: Path) -> None:
    """Two of four are lost, and the run ends; what it saved before three go on from, and seven from what those save."""
    stage = {"rule": rule, "loaders": loaders}
    four = {"1": [32, "before"], "3": [32, "after"]}
    stages = [
        (4, {**stage, "every": 7, "save": "four", "kills": four}),  # 28 minibatches: in the middle of a block
        (3, {**stage, "resume": "four", "stop": 25, "save": "three"}),
        (7, {**stage, "resume": "three"}),
    ]
    killed, resumed, grown = carry_out(stages, tmp_path)
    assert_killed(killed, four, {1})
    assert all(code == 0 for code, _ in resumed), resumed
    assert_exact(grown, living=7)


def test_under_the_launcher(tmp_path: Path) -> None:
    """`paceline run` ends well without the two that were killed, and the model has everything once."""
    stage = {"rule": "asgd", "pauses": PAUSES, "kills": {"1": [9, "before"], "3": [5, "after"]}}
    (tmp_path / "stage.json").write_text(json.dumps(stage))
    program = str(ROOT / "tests" / "processes" / "counting.py")
    command = [sys.executable, "-m", "paceline", "run", "--quiet", "--workers", "4", "--rule", "asgd", program]
    ended = subprocess.run(
        [*command, "stage.json"], cwd=tmp_path, env=surroundings(), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 3, ended.stderr  # which says that some were lost
    lines = [line.split("ENDED", 1)[1] for line in ended.stdout.splitlines() if "ENDED" in line]
    found = [json.loads(line) for line in lines]
    assert sorted(one["rank"] for one in found) == [0, 2]
    assert all(one["wrong"] == 0 for one in found), found


def test_a_repeated_and_a_lost_sample_are_seen() -> None:
    """That the count can fail: one sample twice and another not at all, of as many."""
    import torch

    from tests.processes.counting import fingerprints, one_each

    ids = torch.arange(500)
    wrong = torch.where(ids == 17, 18, ids)
    assert (fingerprints(ids) != fingerprints(wrong)).sum() > 50
    assert (one_each(ids, 500) != one_each(wrong, 500)).sum() == 2

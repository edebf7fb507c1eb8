# SPDX-License-Identifier: Apache-2.0
"""Owners of several shards are killed: every sample is in every shard once, or the run ends by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nursery import ROOT, surroundings

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
PROGRAM = ROOT / "devtools" / "counting" / "pushes.py"


def verdict(directory: Path, deaths: list[tuple[int, str, int]], ends: bool = False, **job: Any) -> dict[str, Any]:
    """What the weights say with which those who live end; `ends`: whether they end with errors."""
    planned = [{"rank": rank, "point": point, "nth": nth} for rank, point, nth in deaths]
    (directory / "job.json").write_text(json.dumps({"deaths": planned, **job}))
    command = [sys.executable, str(PROGRAM), str(directory / "job.json"), str(directory / "run")]
    ended = subprocess.run(command, env=surroundings(), capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert len(found["killed"]) == len(deaths) and bool(found["errors"]) == ends and found["agree"], found
    return found


@pytest.mark.slow  # the storms kill owners
@pytest.mark.parametrize(
    ("rule", "deaths"),
    [
        ("asgd", [(0, "torn", 30), (2, "applied", 60)]),
        pytest.param("dc_asgd(strength=0.01)", [(3, "stepped", 8)], marks=pytest.mark.slow),
        pytest.param("asgd", [(0, "finish", 1)], marks=pytest.mark.slow),
    ],
)
def test_every_sample_is_in_every_piece_once(rule: str, deaths: list[tuple[int, str, int]], tmp_path: Path) -> None:
    found = verdict(tmp_path, deaths, rule=rule)
    assert (found["lost"], found["repeated"], found["said"]) == (0, 0, [])


@pytest.mark.slow
def test_a_rule_that_pushes_parameters_names_what_it_trains_on_again(tmp_path: Path) -> None:
    """Slices skip the push of such samples, but not the parameters of the worker that has trained on them again."""
    found = verdict(tmp_path, [(2, "torn", 60)], rule="easgd(period=1)", samples=480, epochs=1)
    assert any("trained on again after a loss, and parameters are pushed" in line for line in found["said"]), found


@pytest.mark.slow
def test_a_worker_that_was_busy_goes_on_where_another_knows_who_has_gone(tmp_path: Path) -> None:
    """Two of four die, and the last one is certain of neither: it may have stood still while they ended well."""
    found = verdict(tmp_path, [(0, "torn", 30), (2, "applied", 60)], paused=[3])
    assert (found["lost"], found["repeated"], found["said"]) == (0, 0, [])


@pytest.mark.slow
def test_an_owner_and_its_neighbour_at_once_end_the_run_by_name(tmp_path: Path) -> None:
    """The neighbour dies as it takes over, with the only replica."""
    found = verdict(tmp_path, [(1, "applied", 60), (2, "heir", 1)], ends=True)
    assert len(found["errors"]) == 2
    for error in found["errors"]:
        assert "no other worker has a replica of its slices" in error and "last checkpoint" in error

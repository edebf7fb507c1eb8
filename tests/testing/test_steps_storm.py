# SPDX-License-Identifier: Apache-2.0
"""Storms over checkpoint steps: runs that are killed resume with the bits of one that went on."""

from __future__ import annotations

import pytest
from devtools.storm.elastic import StormSettings
from devtools.storm.mutants import MUTANTS, RUN_MUTANTS
from devtools.storm.seeds import storm
from devtools.storm.server_mutants import SERVER_MUTANTS
from devtools.storm.steps_mutants import STEPS_MUTANTS

STEPS = StormSettings("steps")
FOUND = {
    80: "hosts with own disks, killed between their renames of the first step, had no whole step for ever",
    413: "a lock that could not be read ended the training",
}
"""Seeds that failed before a mend."""


@pytest.mark.parametrize("seed", [0, 1, *FOUND])
def test_a_storm_over_steps(seed: int) -> None:
    assert storm(seed, STEPS).problems == []


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("first", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in range(6, 26, 4))])
def test_more_storms_over_steps(first: int) -> None:
    for seed in range(first, first + 4):
        assert storm(seed, STEPS).problems == [], seed


@pytest.mark.parametrize(
    ("name", "seed", "faults"),
    [
        ("each worker resumes from its own newest step", 6, ()),
        ("rank 0 alone says whether a step is whole", 10, ()),
        ("sums of a step's files are not looked at", 0, ("flip",)),
        ("files of a step are not synced", 5, ()),
        ("the folder is not synced after a step's rename", 37, ()),
        ("an old step is deleted before the new one is safe", 25, ()),
    ],
)
def test_planted_bugs_are_found(name: str, seed: int, faults: tuple[str, ...]) -> None:
    settings = StormSettings("steps", faults)
    assert storm(seed, settings).problems == []
    with STEPS_MUTANTS[name]():
        assert storm(seed, settings).problems != []


def test_a_seed_has_one_history() -> None:
    one, other = storm(3, STEPS), storm(3, STEPS)
    assert one.tape == other.tape and one.turns == other.turns and one.seconds == other.seconds


def test_every_bug_can_be_planted() -> None:
    """What a bug takes the place of is still there."""
    for plant in (*MUTANTS.values(), *RUN_MUTANTS.values(), *SERVER_MUTANTS.values(), *STEPS_MUTANTS.values()):
        with plant():
            pass

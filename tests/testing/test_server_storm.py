# SPDX-License-Identifier: Apache-2.0
"""Storms over asynchronous rules: seeds that found something, and planted bugs that are found."""

from __future__ import annotations

import atexit
from dataclasses import replace

import pytest
from devtools.storm.elastic import StormSettings
from devtools.storm.seeds import WORKERS, storm
from devtools.storm.server import countable
from devtools.storm.server_mutants import SERVER_MUTANTS

from paceline.errors import RuleError

SETTINGS = StormSettings("server", workers=WORKERS["server"])
FOUND = {
    82: "a push that waited for slower workers held up later frames, and after a failover all waited for ever",
    2686: "a stopped worker took one that had ended well for dead, and went on: two sides came to the end",
    4529: "after a late death a worker asked workers that had ended for the model that it had already",
}
"""Seeds that failed before a mend."""
FOUND_UNDER = [
    ("asgd(period=8)", 224),  # both connections of two workers ended, both lived, and both went on
    ("asgd(hold=3)", 59),
    ("ssp(staleness=2, period=3)", 10),
    ("ssp(staleness=2, period=3)", 553),  # a goodbye was cut off after the end, which no protocol can exclude
]
"""Rules and seeds that failed before a mend; but for the first and the last, samples of a lost worker's last push were
pushed again together with others."""


@pytest.mark.parametrize("seed", [0, 1, *FOUND])
def test_a_storm_over_the_server(seed: int) -> None:
    assert storm(seed, SETTINGS).problems == []


@pytest.mark.parametrize(("rule", "seed"), FOUND_UNDER)
def test_a_storm_over_the_server_under_a_rule(rule: str, seed: int) -> None:
    assert storm(seed, replace(SETTINGS, rule=rule)).problems == []


def test_a_seed_has_one_history() -> None:
    one, other = storm(10, SETTINGS), storm(10, SETTINGS)
    assert one.tape == other.tape and one.turns == other.turns and one.seconds == other.seconds


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("a push that is sent again is applied again", range(5, 12)),
        ("a minority goes on", range(5, 12)),
        ("minibatches that some shards have are pushed with others", range(68, 69)),
        ("a new keeper leases before all have reported", range(241, 242)),
    ],
)
def test_planted_bugs_are_found(name: str, seeds: range) -> None:
    assert all(storm(seed, SETTINGS).problems == [] for seed in seeds)
    with SERVER_MUTANTS[name]():
        assert any(storm(seed, SETTINGS).problems for seed in seeds)


def test_rules_under_which_the_model_cannot_count_are_refused() -> None:
    with pytest.raises(RuleError, match="asynchronous rules"):
        countable("averaging(period=2)")
    with pytest.raises(RuleError, match="cannot count"):
        countable("easgd(period=4)")


def test_killed_workers_of_a_storm_leave_nothing_to_the_end_of_the_interpreter() -> None:
    settings = StormSettings("server", ("kill_worker",), workers=(2, 8))
    storm(6, settings)  # what the first storm of a process imports stays
    before = atexit._ncallbacks()
    assert storm(12, settings).faults["kill_worker"] > 0 and atexit._ncallbacks() == before


@pytest.mark.parametrize("seed", [3, 8])
def test_half_of_the_seeds_have_their_faults_while_the_workers_train(seed: int) -> None:
    assert storm(seed, StormSettings("server", ("kill_worker",), workers=(2, 8))).faults["kill_worker"] > 0

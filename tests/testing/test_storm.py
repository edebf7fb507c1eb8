# SPDX-License-Identifier: Apache-2.0
"""Storms: seeds that found something, the same history for the same seed, and bugs that are found."""

from __future__ import annotations

import pytest
from devtools.storm.elastic import StormSettings
from devtools.storm.faults import KINDS
from devtools.storm.mutants import MUTANTS, RUN_MUTANTS
from devtools.storm.seeds import shrunk, storm

from paceline.flow.engine import ElasticEngine

FOUND = {
    471: "a worker whose goodbye was lost with the power of the control plane's machine had stopped its heartbeats",
    1441: "a goodbye was lost with the power of the control plane's machine, and the others waited for a day",
    609: "workers that waited for the quorum did not see that the control plane's machine had lost its power",
    1306: "exchanges without end: the record did not say that a member had the state when the server was killed",
    150: "after a full disk a server gave a generation's number again, and two generations exchanged states",
    13525: "a server told what it had read from a record whose rename its killed predecessor had not synced",
    21502: "two generations were formed in one moment, and the storm's member missed the second",
    18433: "two workers of a run whose record's disk was full were given up, and the third made their exchange anew",
    12255: "one worker had ended well, the others were given up, and the storm's launcher let one wait for ever",
    28: "the record was renamed and its folder not synced: after a power failure the run began anew",
}
"""Seeds that failed before a mend."""


@pytest.mark.parametrize("seed", [*range(3), *FOUND])
def test_a_storm_over_the_control_plane(seed: int) -> None:
    assert storm(seed).problems == []


def test_a_seed_has_one_history() -> None:
    for seed in (1, 163):
        one, other = storm(seed), storm(seed)
        assert one.tape == other.tape and one.turns == other.turns and one.seconds == other.seconds


RUNS_FOUND = {
    1074: "after a failure that ends a run the storm's launcher let one worker wait for ever",
    3671: "on a slow disk the simulated lock emptied a file that another process had locked",
}
"""Seeds of whole runs that failed before a mend."""


@pytest.mark.parametrize("seed", RUNS_FOUND)
def test_storms_over_whole_runs_that_failed(seed: int) -> None:
    assert storm(seed, StormSettings("run")).problems == []


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_a_storm_over_whole_runs(seed: int) -> None:
    outcome = storm(seed, StormSettings("run"))
    assert outcome.problems == [] and outcome.exchanges > 0


def test_a_run_without_faults_comes_to_the_end() -> None:
    outcome = storm(0, StormSettings("run", ("join",)))
    assert outcome.problems == [] and outcome.exchanges > 0 and set(outcome.faults) <= {"join"}


@pytest.mark.parametrize(
    "name",
    [
        "the record is not synced",
        "an exchange is committed with the first commit",
        "a newcomer is taken for one that holds the state",
        "a worker comes back without its leases",
    ],
)
def test_planted_bugs_are_found(name: str) -> None:
    with MUTANTS[name]():
        found = next((outcome for seed in range(20) if (outcome := storm(seed)).problems), None)
        assert found is not None
        smaller = shrunk(found, StormSettings())
        again = storm(found.seed, StormSettings(fewer=smaller.fewer), smaller.without)
    assert again.tape == smaller.outcome.tape and again.problems == smaller.outcome.problems != []
    happened = sum(again.faults.values()) - again.faults["liar"]  # which is not drawn with the others
    assert happened <= again.drawn - len(smaller.without)
    assert len(smaller.without) > 0 and again.workers == found.workers - smaller.fewer


@pytest.mark.full
def test_every_fault_happens() -> None:
    total = sum((storm(seed).faults for seed in range(40, 75)), start=storm(39).faults)
    assert set(total) == {*KINDS, "liar"}


@pytest.mark.parametrize("name", ["the newest step is passed over", "a resumed run forgets which samples are done"])
def test_bugs_of_steps_are_found(name: str) -> None:
    with RUN_MUTANTS[name]():
        assert any(storm(seed, StormSettings("run", ("kill_all",))).problems for seed in range(6))


@pytest.mark.parametrize("seed", [57, 210, 2])
def test_workers_that_leave_in_order_train_every_sample_once(seed: int) -> None:
    """In seeds 57 and 210 all that hold the model are asked to leave at once, and others come in their places."""
    outcome = storm(seed, StormSettings("leaving", ("join", "slow_network")))
    assert outcome.problems == [] and outcome.faults["leave"]


def test_a_worker_that_leaves_with_its_work_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(engine: ElasticEngine) -> None:
        if engine.leaving.asked:
            engine.leaving.leave(lambda: engine._end_block(leaving=False))

    monkeypatch.setattr(ElasticEngine, "leave_if_asked", at_once)
    assert any(storm(seed, StormSettings("leaving", ("join",))).problems for seed in range(6))

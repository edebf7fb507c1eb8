# SPDX-License-Identifier: Apache-2.0
"""A run of real processes whose number of members grows, with a model that tells which samples went into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from devtools.counting.job import Job, Kill
from devtools.counting.play import Played, judged, play

from paceline.flow.control.state_machine import HELD
from paceline.observe import read_run
from tests.flow.cluster import Cluster
from tests.flow.test_elastic import check, terms
from tests.flow.test_restored import Counted

pytestmark = pytest.mark.processes
AT_ONCE = "bmuf(period=4, grow='auto(threshold=0.01, blocks=2)', rate_exponent=0.5)"
"""Grows as soon as it is measured what the members are worth."""
EXACT = "bmuf(period=3, momentum=0.0, lr=1.0, grow='2:24, {}:100000', rate_exponent=0)"
"""For the model that counts in whole numbers."""


def sizes(events: list[dict[str, Any]]) -> list[int]:
    """Members of these generations."""
    return [len(one["members"]) for one in events]


def test_members_join_as_they_are_worth_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, terms(4, max_workers=4), rule=AT_ONCE, samples=803, hold=9) as cluster:
        cluster.start(4)
        cluster.until(lambda: cluster.control.status()["held"] == 2, "nobody waits")
        waiting = cluster.until(lambda: [one["doing"] for one in cluster.control.status()["waiting"]], "nobody waits")
        assert len(waiting) == 2 and set(waiting) <= {"", f"waits to join: {HELD}"}
        (cluster.books / "go").touch()
        living = check(cluster, epochs=2)
        assert sizes(cluster.saw("generation"))[:2] == [2, 4] and not cluster.saw("lost")
        assert [(one["before"], one["wanted"]) for one in cluster.saw("grown")] == [(2, 4)]
        assert len(living) == 4 and all(one["steps"] for one in living)
        rates = {one["worker"]: one["rates"] for one in living}  # the square roots of 2 and of 4 workers
        assert rates == {0: [2**0.5, 2.0], 1: [2**0.5, 2.0], 2: [2.0], 3: [2.0]}


def test_a_run_that_was_stopped_goes_on_with_as_many_workers(tmp_path: Path) -> None:
    """All die as three train, and fresh workers under a fresh control plane resume from a checkpoint of those three.

    While a kill is armed nobody trains before five workers are there.
    """
    kills = [Kill("finished", 12, "all"), Kill("stepped", 1 << 30)]
    job = {"workers": 5, "rule": EXACT.format(3), "every_blocks": 1, "samples": 768}
    with Counted(tmp_path, terms(5, min_workers=2), kills, **job) as cluster:
        cluster.start(5)
        cluster.until(lambda: all(child.poll() is not None for child in cluster.children), "not all are killed")
        assert max(sizes(cluster.saw("generation"))) == 3
        cluster.control.close()
        (tmp_path / "control.json").unlink()
        before = len(cluster.events)
        cluster.control = cluster.serve(0)
        cluster.start(2)
        cluster.until(lambda: cluster.control.status()["wanted"] == 3, "the checkpoint does not say it")
        cluster.start(2)
        cluster.until(lambda: cluster.control.status()["held"] == 1, "nobody waits")
        status = cluster.control.status()
        assert (len(status["members"]), status["exchange"]) == (3, 0)
        cluster.start(1)
        cluster.until(lambda: all(child.poll() == 0 for child in cluster.children[5:]), "the run does not end")
        after = [about for kind, about in cluster.events[before:] if kind == "generation"]
        assert sizes(after)[:2] == [2, 3] and max(sizes(after)) == 3
        assert judged(cluster.job, 1, 0.0) == Played(1, 0, 0, 0, 0.0), cluster.said()


@pytest.mark.slow  # the storms grow
def test_under_the_launcher_a_worker_dies_as_the_number_grows(tmp_path: Path) -> None:
    """The exchange of the first generation of four fails, since one member dies before it."""
    kills = [Kill("exchange", 5)]
    job = Job(str(tmp_path), workers=4, rule=EXACT.format(4), kills=kills)
    ask = ["run", "--elastic", "2:4", "--workers", "4", "--timeout", "20", "--log", str(tmp_path / "log")]
    played = play(job, ask, None)
    assert (played.kills, played.lost, played.repeated, played.unfinished) == (1, 0, 0, 0), played.why
    assert len(read_run(tmp_path / "log").workers) >= 4

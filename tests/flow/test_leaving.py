# SPDX-License-Identifier: Apache-2.0
"""Workers that get SIGTERM leave in order: every sample is trained on once.

The ledger is not asked. The model tells what is in it, and the workers write down what they trained on (`O_APPEND`).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from paceline.errors import LEFT
from tests.flow.cluster import Cluster, terms
from tests.flow.program import counted

pytestmark = pytest.mark.processes


def codes(cluster: Cluster) -> list[int]:
    cluster.finish()
    return [child.poll() for child in cluster.children]  # type: ignore[misc]


def in_model(cluster: Cluster) -> Counter[int]:
    """How many samples are in the model how often."""
    return Counter(counted(cluster.books, cluster.samples).round().int().tolist())


def trained(cluster: Cluster) -> Counter[int]:
    """How many samples were trained on how often."""
    times = Counter((cluster.books / "trained").read_text().split())
    return Counter(times[str(sample)] for sample in range(cluster.samples))


@pytest.mark.parametrize(
    "rule", ["bmuf(period=4)", "averaging(period=50)", "streaming_diloco(period=6, fragments=2, overlap=0)"]
)
def test_a_worker_that_leaves_has_trained_for_all(tmp_path: Path, rule: str) -> None:
    """At any place of its loop: its signal comes before the step, in the middle of a block."""
    with Cluster(
        tmp_path, terms(3), rule=rule, terms_at={"1": [7, "before"], "2": [30, "after"]}, samples=800, pause=0.002
    ) as cluster:
        cluster.start(3)
        assert codes(cluster).count(LEFT) == 2, cluster.said()
        assert trained(cluster) == in_model(cluster) == {2: 800}
        assert len(cluster.saw("left early")) == 2 and not cluster.saw("lost")
        assert cluster.control.status()["finished"]


def test_a_signal_while_a_worker_joins_ends_it_at_once(tmp_path: Path) -> None:
    with Cluster(tmp_path, terms(1), hold=10, terms_joining=True) as cluster:
        cluster.start(1)
        cluster.exchanged(1)
        cluster.joined(1, 2)
        assert codes(cluster) == [0, LEFT], cluster.said()
        assert trained(cluster) == in_model(cluster) == {2: 400}


@pytest.mark.parametrize(
    "end", [{"terms_at": {"1": [10, "twice"]}}, {"terms_at": {"1": [10, "before"]}, "kills": {"1": [10, "after"]}}]
)
def test_who_is_killed_as_it_leaves_is_as_any_lost_worker(tmp_path: Path, end: dict[str, Any]) -> None:
    """Its minibatches since the last commit, two, are trained on by another worker; none is in the model twice."""
    with Cluster(tmp_path, terms(2), **end) as cluster:
        cluster.start(2)
        ended = codes(cluster)
        assert ended.count(0) == 1 and min(ended) < 0, cluster.said()
        assert in_model(cluster) == {2: 400}
        again = sum(times - 2 for times in trained(cluster).elements())
        assert 0 < again <= 2 * 4 and min(trained(cluster)) == 2


def test_the_last_worker_writes_a_step_before_it_leaves(tmp_path: Path) -> None:
    """All are asked at once, as by a host that is taken; others go on from where these stopped."""
    place = tmp_path / "steps"
    with Cluster(tmp_path, terms(2), checkpoint=str(place), hold=10, samples=200) as cluster:
        cluster.start(2)
        cluster.exchanged(2)
        for pid in cluster.pids:
            os.kill(pid, signal.SIGTERM)
        (cluster.books / "go").touch()
        assert codes(cluster) == [LEFT, LEFT], cluster.said()
        before, exchanges = trained(cluster), cluster.control.status()["exchange"]
        assert list(place.glob("step-*")) and before[1]
        cluster.start(2)
        assert codes(cluster)[2:] == [0, 0], cluster.said()
        assert trained(cluster) == in_model(cluster) == {2: 200}
        assert cluster.control.status()["exchange"] > exchanges


@pytest.mark.slow  # the storms do
@pytest.mark.full
@pytest.mark.parametrize("seed", range(1))
def test_workers_that_come_and_go_at_any_time(tmp_path: Path, seed: int) -> None:
    """Signals at random times, also before an exchange, within one, and while workers join; each is replaced."""
    random = Random(seed)
    with Cluster(tmp_path, terms(3), samples=2000, pause=0.002) as cluster:
        cluster.start(3)
        for number in range(8):
            cluster.exchanged(10 * number + random.randrange(1, 8))
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(random.choice([one.pid for one in cluster.children if one.poll() is None]), signal.SIGTERM)
            cluster.start(1)
        ended = codes(cluster)
        assert set(ended) == {0, LEFT} or set(ended) == {0, LEFT, -signal.SIGTERM}, cluster.said()
        assert trained(cluster) == in_model(cluster) == {2: 2000}

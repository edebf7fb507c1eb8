# SPDX-License-Identifier: Apache-2.0
"""Workers that come and go: real processes, real deaths, and a model that tells which samples went into it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.observe import read_run
from tests.flow.cluster import Cluster, terms
from tests.flow.program import counted

pytestmark = pytest.mark.processes


def check(cluster: Cluster, epochs: int = 1, gone: int = 0) -> list[dict[str, Any]]:
    """The run comes to its end, with every sample once an epoch, and the same model on everybody."""
    ended = cluster.finish()
    living = [one for one in ended if one is not None]
    assert len(living) == len(ended) - gone, cluster.said()
    assert len({one["state"] for one in living}) == 1
    counts = counted(cluster.books, cluster.samples)
    assert torch.allclose(counts, torch.full_like(counts, epochs), atol=1e-6), counts.round().unique(return_counts=True)
    return living


@pytest.mark.claim
def test_without_faults_every_sample_is_in_the_model_once(tmp_path: Path) -> None:
    with Cluster(tmp_path, terms(3), epochs=3, samples=203) as cluster:
        cluster.start(3)
        check(cluster, epochs=3)
        assert not cluster.saw("lost")


@pytest.mark.parametrize("apart", [False, True])
def test_a_joining_worker_gets_frozen_tensors_that_it_does_not_hold_once(apart: bool, tmp_path: Path) -> None:
    frozen = 1 << 21
    with Cluster(tmp_path, terms(2), hold=20, frozen=frozen, apart=apart) as cluster:
        cluster.start(2)
        cluster.exchanged(4)
        cluster.joined(1, 3)
        check(cluster, epochs=2)
    lines = [line for log in (tmp_path / "log").glob("rank-*.jsonl") for line in log.read_text().splitlines()]
    (gave,) = [event["bytes"] for event in map(json.loads, lines) if event["kind"] == "gave"]
    assert gave < 1 << 16 if not apart else frozen <= gave < frozen + (1 << 16)


@pytest.mark.parametrize(
    "rule", ["bmuf(period=4)", "diloco(period=3, ema=0.6)", "streaming_diloco(period=6, fragments=2, overlap=0)"]
)
def test_survivors_and_joining_workers(tmp_path: Path, rule: str) -> None:
    kills = {"1": [9, "before"], "2": [30, "after"]}
    with Cluster(tmp_path, terms(3), rule=rule, kills=kills, hold=40, samples=800) as cluster:
        cluster.start(3)
        cluster.until(lambda: len(cluster.saw("lost")) == 2, "nobody is lost")
        cluster.joined(2, 5)
        living = check(cluster, epochs=2, gone=2)
        assert len(living) == 3 and all(one["steps"] for one in living)
        assert cluster.control.status()["generation"] >= 5


@pytest.mark.parametrize("wrong", [{"nans": {"1": 10}}, {"jumps": {"1": 60}}], ids=["nan", "outlier"])
def test_a_contribution_that_is_left_out_is_done_again(tmp_path: Path, wrong: dict[str, dict[str, int]]) -> None:
    with Cluster(tmp_path, terms(2), samples=800, **wrong) as cluster:
        cluster.start(2)
        check(cluster, epochs=2)
        assert [(one["worker"], one["skipped"]) for one in cluster.saw("returned")] == [(1, 0)]


def test_a_stopped_worker_is_lost_and_says_so(tmp_path: Path) -> None:
    with Cluster(tmp_path, terms(2, timeout_s=15.0), stops={"1": 6}) as cluster:
        cluster.start(2)
        cluster.until(lambda: cluster.saw("lost"), "nobody is lost")
        for pid in cluster.pids:  # who came second is worker 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        check(cluster, epochs=2, gone=1)
        assert sum("GivenUpError" in said for said in cluster.said()) == 1


@pytest.mark.slow
def test_joining_workers_begin_with_the_tuned_settings(tmp_path: Path) -> None:
    """Also with what was agreed on in the very exchange behind which they come."""
    tune = {"lr_factor": 0.999}
    with Cluster(tmp_path, terms(2), tune=tune, hold=20, samples=800) as cluster:
        cluster.start(2)
        cluster.exchanged(3)
        cluster.joined(1, 3)
        living = check(cluster, epochs=2)
        assert len(living) == 3
        run = read_run(tmp_path / "log")
        # batches of four, and none is counted twice
        assert sum(one.minibatches for one in run.workers) == 2 * cluster.samples // 4
        assert run.workers[2].inherited > 0 < run.workers[2].began_s
        assert living[0]["tuned"] and all(one["tuned"] == living[0]["tuned"] for one in living)


def test_below_the_quorum_the_run_waits_for_workers(tmp_path: Path) -> None:
    with Cluster(tmp_path, terms(2, min_workers=2), kills={"1": [9, "before"]}, samples=800) as cluster:
        cluster.start(2)
        cluster.until(lambda: cluster.saw("lost"), "nobody is lost")
        assert "1 of at least 2 workers" in cluster.control.status()["paused"]
        cluster.start(1)
        check(cluster, epochs=2, gone=1)


def test_changes_reach_all_workers_and_joining_ones(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"0": [10, {"lr_factor": 0.5}], "1": [11, {"period": 6}]}
    with Cluster(tmp_path, terms(2), tunes=asked, kills={"1": [30, "before"]}, hold=60, samples=800) as cluster:
        cluster.start(2)
        cluster.until(lambda: cluster.saw("lost"), "nobody is lost")
        cluster.joined(1, 3)
        assert [one["period"] for one in check(cluster, epochs=2, gone=1)] == [6, 6]


def test_rules_that_cannot_are_refused(tmp_path: Path) -> None:
    for rule, says in (("sync", "exchanges no blocks"), ("bmuf(period=4, overlap=2)", "overlap")):
        folder = tmp_path / says.split()[0]
        folder.mkdir()
        with Cluster(folder, terms(1), rule=rule) as cluster:
            cluster.start(1)
            assert cluster.finish() == [None]
            assert says in cluster.said()[0] and "an elastic run needs a block rule" in cluster.said()[0]

# SPDX-License-Identifier: Apache-2.0
"""A log that is too long for memory keeps its totals and its curves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.observe import read_run
from paceline.observe.reports import read
from paceline_plugins.report.curves import by_samples, bytes_by_time
from paceline_plugins.report.totals import rejected_counts, summarize

from .conftest import Event, pushing

Write = Callable[..., Path]


def refused(rank: int, events: list[Event]) -> list[Event]:
    for event in events:
        if event["kind"] == "exchange" and event["block"] in (3, 7):
            event["left_out"] = [1]
    return events


@pytest.mark.parametrize("change", [refused, pushing])
def test_a_folded_log_says_the_same(write_run: Write, monkeypatch: pytest.MonkeyPatch, change: object) -> None:
    directory = write_run(change=change)
    whole = read_run(directory)
    monkeypatch.setattr(read, "MOST_LINES", 4)
    monkeypatch.setattr(read, "MOST_REPORTS", 4)
    short = read_run(directory)
    assert all(len(worker.exchanges) <= 9 and len(worker.values) <= 9 for worker in short.workers)
    one, other = summarize(whole), summarize(short)
    assert (one.minibatches, one.samples, one.blocks, one.bytes_per_worker) == (
        other.minibatches,
        other.samples,
        other.blocks,
        other.bytes_per_worker,
    )
    assert vars(other.shares) == pytest.approx(vars(one.shares))
    assert (other.delays, other.left_out) == (one.delays, one.left_out)
    assert rejected_counts(short) == rejected_counts(whole)
    assert bytes_by_time(short).y[-1] == bytes_by_time(whole).y[-1]


def test_every_worker_keeps_the_same_reports(write_run: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that those of one minibatch still are one point."""
    directory = write_run(size=3)
    monkeypatch.setattr(read, "MOST_REPORTS", 5)
    run = read_run(directory)
    kept = [[value.total_minibatches for value in worker.values if value.name == "loss"] for worker in run.workers]
    assert kept[0] == kept[1] == kept[2] and len(kept[0]) > 3
    assert len(set(np.diff(kept[0]))) == 1  # evenly
    assert len(by_samples(run, "loss").x) == len(kept[0])

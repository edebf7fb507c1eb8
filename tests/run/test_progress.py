# SPDX-License-Identifier: Apache-2.0
"""What one of several workers says for all: a logger, and how far the outermost loop is."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.observe.reports.live import Live
from paceline.run import run as module


def attached(**settings: Any) -> paceline.Run:
    model = torch.nn.Linear(2, 1)
    return paceline.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "bmuf", **settings)


def test_a_loop_tells_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.0)
    with attached(log=tmp_path) as run:
        assert list(run.progress(range(3))) == [0, 1, 2]
        assert list(run.progress(iter("ab"), total=2)) == ["a", "b"]
        assert list(run.progress(iter("ab"))) == ["a", "b"]  # of unknown length: nothing is told
    events = [json.loads(line) for line in (tmp_path / "rank-000.jsonl").read_text().splitlines()]
    told = [(event["turn"], event["turns"]) for event in events if event["kind"] == "turn"]
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3), (0, 2), (1, 2), (2, 2)]
    assert Live(tmp_path).poll().whole[0] == 1.0


def test_one_worker_logs(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        with attached() as run:
            run.logger.warning("epoch %d", 3)
            assert run.logger.isEnabledFor(logging.ERROR) == run.is_main

    with caplog.at_level(logging.INFO, "program"):
        paceline.simulate(work, 3)
    assert [record.message for record in caplog.records if record.name == "program"] == ["epoch 3"]

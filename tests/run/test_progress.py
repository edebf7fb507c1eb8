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
from paceline.cli.run import status
from paceline.observe.reports.live import Live, LiveSnapshot
from paceline.run import progress


def attached(**settings: Any) -> paceline.Run:
    model = torch.nn.Linear(2, 1)
    return paceline.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "bmuf", **settings)


def test_a_loop_tells_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
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


def test_without_a_terminal_the_status_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[int] = []

    class Logs:
        def poll(self) -> LiveSnapshot:
            said.append(1)
            return LiveSnapshot(2, "bmuf()", {0: 60, 1: 60}, 40.0, exchange_share=0.1, whole=(0.5, 130.0))

    with status.lines(Logs(), 2, every_s=0.001):  # type: ignore[arg-type]
        while len(said) < 3:
            pass
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2 and lines[0].endswith(
        "50 % of the run, 2 min 10 s left | 120 minibatches (40/s) | efficiency 90 %"
    )

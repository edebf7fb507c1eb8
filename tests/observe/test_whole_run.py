# SPDX-License-Identifier: Apache-2.0
"""How much of a run is done, and when it ends: only where the program has told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.reports.live import Live


def shot(tmp_path: Path, *events: dict[str, Any]) -> tuple[float | None, float | None]:
    lines = [{"kind": "attach", "at_s": 0.0, "rank": 0, "size": 1}, *events]
    (tmp_path / "rank-000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Live(tmp_path).poll().whole


def value(at_s: float, minibatches: int) -> dict[str, Any]:
    return {"kind": "value", "at_s": at_s, "name": "loss", "value": 1.0, "total_minibatches": minibatches, "block": 0}


def test_a_turn_is_as_far_as_its_pass(tmp_path: Path) -> None:
    """By hand: 1.5 of 4 turns in 15 s, so 25 s are left."""
    events = [
        {"kind": "turn", "at_s": 0.0, "turn": 0, "turns": 4},
        {"kind": "epoch", "at_s": 0.0, "epoch": 0, "batches": 10},
        value(10.0, 10),
        {"kind": "turn", "at_s": 10.0, "turn": 1, "turns": 4},
        {"kind": "epoch", "at_s": 10.0, "epoch": 1, "batches": 10},
        value(15.0, 15),
    ]
    assert shot(tmp_path, *events) == pytest.approx((0.375, 25.0))


def test_a_run_that_was_resumed_counts_its_own_pace(tmp_path: Path) -> None:
    turns = [{"kind": "turn", "at_s": 10.0 * turn, "turn": turn, "turns": 10} for turn in (6, 7)]
    assert shot(tmp_path, *turns) == pytest.approx((0.7, 30.0))

# SPDX-License-Identifier: Apache-2.0
"""What reports say about settings that changed while a run went on."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.observe.reports.read import read_run
from paceline_plugins.report.tables import tuned_rows
from tests.helpers import Place, train


def test_each_change_has_a_row(tmp_path: Path) -> None:
    def hook(place: Place) -> None:
        if (place.rank, place.step) == (1, 0):
            place.run.tune(lr=0.5)
        if (place.rank, place.step) == (0, 4):
            place.run.tune(revert=True)
            place.run.tune(revert=True)  # there is nothing left to undo by then

    train("averaging(period=2)", 2, after_step=hook, settings={"log": tmp_path})
    rows = tuned_rows(read_run(tmp_path))
    assert [row["asked by worker"] for row in rows] == ["1", "0", "0"]
    assert rows[0]["what"] == "lr 0.1 → 0.5" and (rows[0]["minibatch"], rows[0]["block"]) == ("2", "1")
    assert rows[1]["what"] == "undone: lr@0 0.5 → 0.1" and rows[1]["minibatch"] == "6"
    assert rows[2]["what"] == "refused: there is no change to undo"
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "rank-001.jsonl").read_text().splitlines()]
    assert kinds.count("tune") == 2

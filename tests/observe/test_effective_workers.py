# SPDX-License-Identifier: Apache-2.0
"""How many workers all are worth: measured by block exchanges, and told by the log, the status line and the report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import paceline
from paceline.observe import read_run
from paceline_plugins.report.charts import effective_over_time
from paceline_plugins.report.tables import facts
from paceline_plugins.report.totals import summarize
from tests.helpers import rank
from tests.update.engine.test_blocks import Scalars
from tests.update.engine.test_diversity import SPEEDS

WORTH = (1.5 / 1.0) ** 2  # of the mean norm 1.5 of displacements whose mean has the norm 1


def logged(directory: Path, rule: str, **settings: object) -> Path:
    """A run of 4 workers that move one number at different speeds."""

    def program() -> None:
        model = Scalars(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with paceline.attach(model, optimizer, rule, log=directory, **settings):  # type: ignore[arg-type]
            for _ in range(12):
                model.p[0].grad = torch.full_like(model.p[0], -SPEEDS[rank()])
                optimizer.step()

    paceline.simulate(program, len(SPEEDS))
    return directory


@pytest.mark.parametrize("rule", ["bmuf(period=2)", "averaging(period=2, codec='int8')", "diloco(period=3, overlap=1)"])
def test_a_log_tells_how_many_workers_all_are_worth(tmp_path: Path, rule: str) -> None:
    run = read_run(logged(tmp_path, rule))
    assert summarize(run).effective == pytest.approx(WORTH, abs=0.01)
    assert facts(run)["effective workers"] == "2.2"
    for worker in run.workers:
        assert worker.exchanges[-1].effective_workers == pytest.approx(WORTH, abs=0.01)


def test_a_run_without_a_guard_or_without_blocks_does_not_tell(tmp_path: Path) -> None:
    for name, rule, guard in (("unguarded", "bmuf(period=2)", None), ("sync", "sync", "auto")):
        run = read_run(logged(tmp_path / name, rule, guard=guard))
        assert summarize(run).effective is None and "effective workers" not in facts(run)
        assert list(effective_over_time([run])) == []

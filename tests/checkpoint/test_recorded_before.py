# SPDX-License-Identifier: Apache-2.0
"""What paceline wrote and what its runs ended with before its folders were moved (`tests/fixtures/before_the_move`)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.__main__ import main
from paceline.observe import read_run
from tests.fixtures.before_the_move import make
from tests.fixtures.before_the_move.make import HERE, KEPT, LOG, RECIPES, SAVED, STEPS

RECORDED = make.recorded()
CHECKPOINTS = {**SAVED, STEPS: KEPT}


@pytest.fixture
def digests() -> dict[str, Any]:
    """Those that were recorded for a processor like this one."""
    if make.processor() not in RECORDED:
        known = [name for name in RECORDED if name.startswith(("fused", "plain"))]
        pytest.skip(f"bits were recorded for processors that are {' or '.join(known)}, not for {make.processor()}")
    return dict(RECORDED[make.processor()])


def directory(name: str, tmp_path: Path) -> Path:
    """A copy of a recorded checkpoint, or of the folder of steps."""
    return Path(shutil.copytree(HERE / name, tmp_path / name))


def test_every_recipe_was_recorded() -> None:
    ran = {paceline.rule_from_text(case.rule).name for case in (*RECIPES, make.MULTIPLIES)}
    assert ran == set(paceline.RECIPES)


def test_rules_put_together_by_hand_are_still_called_so() -> None:
    """A run is refused where the text of its rule is not the checkpoint's."""
    assert make.texts() == RECORDED["texts"]


def test_recipes_end_with_the_bits_of_before(digests: dict[str, Any]) -> None:
    now = {make.name_of(case): make.whole(case) for case in RECIPES}
    assert now == digests["recipes"]


def test_a_recipe_that_multiplies_matrices_ends_with_the_values_of_before() -> None:
    now = make.train(make.Program(make.MULTIPLIES, {}))
    torch.testing.assert_close(now, {name: torch.tensor(rows) for name, rows in RECORDED["values"].items()})


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("workers", make.AGAIN)
def test_a_checkpoint_of_before_goes_on(name: str, workers: int, digests: dict[str, Any], tmp_path: Path) -> None:
    path = directory(name, tmp_path)
    assert make.again(CHECKPOINTS[name], path, workers) == digests["again"][name][str(workers)]


def test_steps_of_before_are_gone_on_with_and_kept(digests: dict[str, Any], tmp_path: Path) -> None:
    path = directory(STEPS, tmp_path)
    old = {step.name for step in path.glob("step-*")}
    found = make.again(KEPT, None, make.WORKERS, checkpoint=path, every_blocks=2, keep=1)
    assert found == digests["again"][STEPS][str(make.WORKERS)]
    assert old.isdisjoint(step.name for step in path.glob("step-*"))  # newer ones took their place


def test_what_was_recorded_agrees_with_itself() -> None:
    """The checkpoints were made where products are fused: there, runs that go on end as those that were whole."""
    fused = RECORDED["fused"]
    assert {name: by[str(make.WORKERS)] for name, by in fused["again"].items()} == fused["whole"]


def test_runs_that_save_end_with_the_bits_of_before(digests: dict[str, Any], tmp_path: Path) -> None:
    for name, case in CHECKPOINTS.items():
        each = make.saves(tmp_path / name, ends=False)
        assert make.simulate(make.Program(case, {}, shuffle=True, each=each)) == digests["whole"][name], name


def test_a_run_that_is_tuned_and_merged_ends_with_the_bits_of_before(digests: dict[str, Any], tmp_path: Path) -> None:
    assert make.logged(tmp_path / LOG) == digests["log"]


def test_an_event_log_of_before_is_read() -> None:
    run = read_run(HERE / LOG)
    assert (run.size, run.rule, run.hosts) == (2, "bmuf(period=3, reproducible=True)", ["alder", "birch"])
    assert run.value_names == ["loss", "half"] and len(run.tuned) == 2
    for worker in run.workers:
        assert (worker.minibatches, worker.samples, worker.blocks, worker.saves) == (20, 40, 8, 1)
        assert not worker.damaged and not worker.truncated and not worker.errors and worker.closed is not None
        assert [line.epoch for line in worker.epochs] == [0, 1]
        assert [line.minibatches for line in worker.exchanges] == [3, 3, 2, 3, 3, 3, 2, 1]  # merged after 8, period 2
    assert [worker.bytes for worker in run.workers] == [3817, 3657]
    assert run.last("loss") == pytest.approx(3.75021, abs=1e-4)


@pytest.mark.plugins
def test_the_report_of_an_event_log_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["paceline", "report", str(HERE / LOG), "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    told = capsys.readouterr().out
    for figure in ("bmuf(period=3, reproducible=True)", "3.7501", "1.8751", "12.3 s", "6.5", "3.74 kB"):
        assert figure in told
    assert (tmp_path / "index.html").stat().st_size > 10_000

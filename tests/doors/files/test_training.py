# SPDX-License-Identifier: Apache-2.0
"""Closed tools under virtual workers: the files are merged by the rule's own equation, and a run can be continued."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.errors import DataError, MismatchError
from paceline_plugins.files.plan import Plan
from paceline_plugins.files.worker import train
from tests.doors.files.plans import MOMENTUM, numbers, plan, rows

pytestmark = pytest.mark.processes  # the tools


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(asked: Plan, workers: int = 2) -> None:
    paceline.simulate(lambda: train(asked), workers)


def test_averaging_takes_the_mean_of_the_files() -> None:
    run(plan(epochs=2))
    assert numbers("work/merged/block-00001.bin") == [0.375, 1.375, -1.625]  # parts add 0.25 and 0.5
    assert numbers("out.bin") == numbers("work/merged/block-00002.bin") == [0.75, 1.75, -1.25]
    assert numbers("model.bin") == [0, 1, -2]


def test_block_momentum_is_that_of_the_rule(capfd: pytest.CaptureFixture[str]) -> None:
    """d = 0.375 in each block; Delta = d, 1.5 d, 1.75 d; the workers start at theta + Delta / 2."""
    run(plan(rule=MOMENTUM, epochs=3, numbers=(0.0,), loss="loss=([0-9.]+)"))
    merged = [numbers(f"work/merged/block-0000{block}.bin")[0] for block in (1, 2, 3)]
    assert merged == [0.375, 2.5 * 0.375, 4.25 * 0.375]
    assert [row["loss"] for row in rows()] == [0, 1.5 * 0.375, 3.25 * 0.375], "what the tools were given"
    assert "block 3, epoch 2, rate 0.25, loss 1.21875" in capfd.readouterr().err


def test_bytes_that_are_no_numbers_are_the_first_workers() -> None:
    run(plan(epochs=1, shuffle=False))
    assert [Path(f"work/scratch/rank-00{rank}/out.bin").read_bytes()[:4] for rank in (0, 1)] == [b"   0", b"   1"]
    assert Path("out.bin").read_bytes()[:4] == b"   0"
    run(plan(epochs=2, shuffle=False))
    assert {Path(f"work/scratch/rank-00{rank}/in.bin").read_bytes()[:4] for rank in (0, 1)} == {b"   0"}


def test_each_line_is_trained_on_once_an_epoch() -> None:
    Path("list").write_text("".join(f"line-{k}\n" for k in range(11)))
    run(plan("list", "{list}", data=str(Path("list").absolute()), parts=4, epochs=2))
    epochs: list[list[str]] = [[], []]
    for part in range(4):
        for epoch, text in enumerate(Path(f"seen-{part}").read_text().split("\n\n")[:2]):
            epochs[epoch] += text.split()
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"line-{k}" for k in range(11))
    assert epochs[0] != epochs[1], "each epoch has an order of its own"
    assert [(row["epoch"], row["block"]) for row in rows()] == [(0, 1), (0, 2), (1, 3), (1, 4)]


def test_newbob_halves_the_rate_and_ends() -> None:
    """The loss is the model's first number: 8, then hardly less, because rates are small and negative steps are not."""
    run(plan(epochs=9, lr=1e-9, numbers=(8.0,), loss="loss=(.+)", newbob=True))
    assert [row["loss"] for row in rows()] == [8, 8, 8]
    assert [row["lr"] for row in rows()] == [1e-9, 1e-9, 5e-10], "halving began after the second, and ended the third"
    assert Path("out.bin").exists()


def test_a_worker_that_diverged_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    run(plan("diverge", shuffle=False))
    assert numbers("out.bin") == [0.25, 1.25, -1.75]


def test_a_tool_that_trains_nothing_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    run(plan("same", epochs=2))
    said = capfd.readouterr().err
    assert said.count("the tool wrote the numbers of the model that it read") == 2, "once a worker"
    assert numbers("out.bin") == numbers("model.bin")


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("fail", "block 1, part 0 of 2: .* ended with exit code 3; its last line was 'no room on the device'"),
        ("die", "was killed by SIGKILL"),
        ("nothing", "ended with exit code 0 and wrote no model to"),
        ("short", r"has the tensor 'w' of shape \(2,\) and float32 where the model has 'w' of shape \(3,\)"),
    ],
)
def test_a_tool_that_fails_is_told_in_a_sentence(what: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        run(plan(what, shuffle=False))
    assert numbers("model.bin") == [0, 1, -2] and not Path("out.bin").exists()


def test_a_truncated_model_is_told() -> None:
    asked = plan("short", layout="skip:4, w:f32:3")
    with pytest.raises(DataError, match="that the tool wrote cannot be read: the layout needs 16 bytes, and it has 12"):
        run(asked)


def test_a_loss_that_is_not_there_is_told() -> None:
    with pytest.raises(DataError, match="printed no line in which --loss 'error=' finds a number"):
        run(plan(loss="error="))
    with pytest.raises(DataError, match="finds 'rate' in the tool's output, which is no number"):
        run(plan(loss="rate"))


def test_a_starter_ends_the_tool_with_its_worker() -> None:
    from paceline.core import parent_death

    run(plan(starter=[sys.executable, "-I", "-S", parent_death.__file__]))
    assert numbers("out.bin") == [0.375, 1.375, -1.625]
    missing = plan(starter=[sys.executable, "-I", "-S", parent_death.__file__], command=["./no-tool", "{part}"])
    with pytest.raises(
        DataError, match=r"ended with exit code 127 \(was it found\?\); its last line was 'cannot start"
    ):
        run(dataclasses.replace(missing, epochs=2))


def test_a_run_goes_on_with_the_same_bytes() -> None:
    run(plan(rule=MOMENTUM, epochs=4, parts=4))
    whole = Path("out.bin").read_bytes()
    merged = Path("work/merged/block-00008.bin").read_bytes()
    os.rename("work", "first")
    run(plan(rule=MOMENTUM, epochs=1, parts=4))
    assert len(rows()) == 2 and Path("out.bin").read_bytes() != whole
    run(plan(rule=MOMENTUM, epochs=4, parts=4))
    assert Path("out.bin").read_bytes() == whole and Path("work/merged/block-00008.bin").read_bytes() == merged
    assert [row["block"] for row in rows()] == list(range(1, 9))
    assert len(list(Path("work/steps").iterdir())) == 2


def test_machines_with_other_options_are_refused() -> None:
    asked = plan()
    others = iter([asked, dataclasses.replace(asked, parts=4)])
    with pytest.raises(MismatchError, match=r"other options than this one \(parts differ\)"):
        paceline.simulate(lambda: train(next(others)), 2)


def test_a_run_survives_a_kill_at_every_point() -> None:
    """In a process that forks the runs: torch loads once."""
    command = [sys.executable, "-m", "tests.doors.files.kills"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) >= 12, "points"

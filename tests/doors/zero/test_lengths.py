# SPDX-License-Identifier: Apache-2.0
"""Lengths, means and schedules under zero lines: what each is of, and what is said where it is of something else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline
from paceline.doors.zero.refusals import Refusal
from tests.doors.zero.worlds import passes, run_program, samples

TRAINING = """
loader = DataLoader(Numbers(48), batch_size=2, shuffle=True)
{before}
for epoch in range(2):
    seen.append([])
    for k, x in loader:
        train(k, x)
        {step}
    {behind}
"""


def said(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rule: str = "averaging",
    **parts: str,
) -> str:
    """What is said on stderr of a training of 24 batches on four workers."""
    source = TRAINING.format(**{"before": "pass", "step": "pass", "behind": "pass", **parts})
    found = run_program(folder, monkeypatch, source, 4, rule)
    for epoch in range(2):
        assert sorted(k for one in passes(found) for k in samples(one[epoch])) == list(range(48))
    return " ".join(capsys.readouterr().err.split())


def test_a_mean_over_the_length_of_all_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(tmp_path, monkeypatch, capsys, behind="mean = 1.0 / len(loader.dataset)")
    assert text.count("asks how many training samples there are (48)") == 1 and "trains on 1/4 of them" in text
    assert "asks how many" not in said(tmp_path, monkeypatch, capsys, behind="mean = 1.0 / len(loader)")


SCHEDULES = {
    "OneCycleLR": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, epochs=2, steps_per_epoch=48 // 2)",
    "CosineAnnealingLR": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48)",
    "LambdaLR": "(lambda total: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / total))(48)",
}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_schedule_that_was_made_for_the_steps_of_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text = said(tmp_path, monkeypatch, capsys, before=f"rates = {SCHEDULES[name]}", step="rates.step()")
    assert text.count(f"{name} was made for 2 passes of 24 steps, and a pass of this worker has 6") == 1
    if name != "CosineAnnealingLR":
        return
    asked = f"shown = len(loader)\nrates = {SCHEDULES[name]}"  # for show
    text = said(tmp_path, monkeypatch, capsys, before=asked, step="rates.step()")
    assert text.count("CosineAnnealingLR was made for 48 steps, and has made 12") == 1
    fits = "rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader))"
    assert "was made for" not in said(tmp_path, monkeypatch, capsys, before=fits, step="rates.step()")
    by_epoch = "rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)"
    assert "was made for" not in said(tmp_path, monkeypatch, capsys, before=by_epoch, behind="rates.step()")


def test_block_momentum_over_adam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adam = "optimizer = torch.optim.Adam(model.parameters())"
    assert "on top of Adam's own moments" in said(tmp_path, monkeypatch, capsys, "bmuf", before=adam)
    assert "on top of" not in said(tmp_path, monkeypatch, capsys, "bmuf_adam", before=adam)
    assert "on top of" not in said(tmp_path, monkeypatch, capsys, "bmuf")


ENGINE = """
def go(step, data):
    count = len(data)
    for number, (k, x) in enumerate(data):
        if number == count:
            break
        step(k, x)
"""
ENGINES = """
from engine_of_a_library import go

loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
held_out = DataLoader(Numbers(6), batch_size=2)

def training(k, x):
    model.train()
    train(k, x)

def looking(k, x):
    model.eval()
    with torch.no_grad():
        look(k, x)

for epoch in range(3):
    seen.append([])
    go(training, loader)
    seen.append([])
    go(looking, loader)
    seen.append([])
    go(looking, held_out)
"""


def test_an_engine_that_goes_as_far_as_it_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine_of_a_library.py").write_text(ENGINE)
    found = run_program(tmp_path, monkeypatch, ENGINES)
    for epoch in range(3):
        assert sorted(k for one in passes(found) for k in samples(one[3 * epoch])) == list(range(24))
        assert all(sorted(samples(one[3 * epoch + 1])) == list(range(24)) for one in passes(found))
        assert all(samples(one[3 * epoch + 2]) == list(range(6)) for one in passes(found))


def test_an_evaluation_that_ends_where_a_part_would_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    count = len(loader)
    for epoch in range(2):
        seen.append([])
        for k, x in loader:
            train(k, x)
        with torch.no_grad():
            source = iter(loader)
            for _ in range(count):
                look(*next(source))
            del source
    """
    with pytest.raises(Refusal, match="went through 24 samples without a step, and left them after 6 batches"):
        run_program(tmp_path, monkeypatch, source)


def test_without_gradients_a_length_is_that_of_all_also_within_a_training_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
    loader, told = DataLoader(Numbers(24), batch_size=2, shuffle=True), []
    seen.append([])
    for k, x in loader:
        train(k, x)
        with torch.no_grad():
            told.append((len(loader), "without"))
        told.append((len(loader), "with"))
    """
    for one in run_program(tmp_path, monkeypatch, source):
        assert set(one["told"]) == {(12, "without"), (6, "with")}


@pytest.mark.processes
def test_frames_are_known_where_torch_and_paceline_are_imported_through_a_link(tmp_path: Path) -> None:
    """An environment may be a link: files of frames are called as they were imported."""
    for package in (paceline, torch):
        (tmp_path / package.__name__).symlink_to(Path(package.__file__).resolve().parent)
    told = "import torch, paceline.doors.zero.callers as w; from paceline.cli.run import tracebacks\n"
    told += "print([f.__code__.co_filename.startswith(p) for f, p in "
    told += "((torch.nn.Linear.forward, w.TORCH), (w.here, w.PACKAGE), (tracebacks.folded, tracebacks.PACKAGE))])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "[True, True, True]", ended.stderr

# SPDX-License-Identifier: Apache-2.0
"""What is taken, and what is said, when steps are damaged, unfinished, foreign, or cannot be written."""

from __future__ import annotations

import json
import logging
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint import claim, files, saving
from paceline.checkpoint.claim import DirectoryClaim
from paceline.core.disk import LocalDisk
from paceline.errors import CheckpointError, UnsupportedError
from tests.checkpoint.test_exact import kept, steps
from tests.helpers import Program, adam, attached, same_bits, simulate, train

RULE = "bmuf_adam(period=3)"
CHOICES: dict[str, Any] = {"optimizer": adam, "samples": 48}


def stopped(path: Path, workers: int = 2, **more: Any) -> None:
    """A run that is stopped behind minibatch 10, with the steps 3, 6 and 9."""
    train(RULE, workers, **CHOICES, stop_at=10, settings=kept(path, **more))
    assert steps(path) == [3, 6, 9]


def resumed(path: Path, workers: int = 2, **more: Any) -> Any:
    return train(RULE, workers, **CHOICES, settings=kept(path, **more))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def swap(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


class Boom:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.kill, (os.getpid(), signal.SIGKILL)


def poison(file: Path) -> None:
    """A pickle in the place of tensors, with a sum that fits: somebody wants it to be read."""
    file.write_bytes(pickle.dumps(Boom()))
    manifest = file.with_name("manifest.json")
    told = json.loads(manifest.read_text())
    told["files"][file.name] = files.sha256(file)
    told["sum"] = files.own_sum(told)
    manifest.write_text(json.dumps(told))


def escape(file: Path) -> None:
    """A manifest that names files elsewhere."""
    told = json.loads(file.read_text())
    told["files"]["../../secret"] = "0" * 64
    file.write_text(json.dumps(told))


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a flipped bit in a rank's tensors": ("rank-001.safetensors", flip, "damaged: its sha256 sum"),
    "a flipped bit in a rank's JSON": ("rank-000.json", flip, "damaged: its sha256 sum"),
    "a flipped bit in the global model": ("global.safetensors", flip, "damaged: its sha256 sum"),
    "cut off": ("rank-000.safetensors", lambda f: os.truncate(f, 100), "damaged: its sha256 sum"),
    "empty": ("rank-001.safetensors", lambda f: os.truncate(f, 0), "damaged: its sha256 sum"),
    "a rank's file is gone": ("rank-001.json", Path.unlink, "is missing"),
    "the manifest is gone": ("manifest.json", Path.unlink, "has no manifest.json"),
    "a flipped bit in the manifest": ("manifest.json", flip, "damaged"),
    "another count in the manifest": ("manifest.json", lambda f: swap(f, '"blocks": 3', '"blocks": 2'), "its own sum"),
    "half a manifest": ("manifest.json", lambda f: os.truncate(f, 60), "damaged"),
    "a pickle with a sum that fits": ("rank-001.safetensors", poison, "is no safetensors file"),
    "a pickle as the global model": ("global.safetensors", poison, "holds something else"),
    "a manifest that names other files": ("manifest.json", escape, "which is no file of a checkpoint"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_step_is_named_and_the_one_before_it_taken(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, harm, said = DAMAGE[what]
    stopped(tmp_path / "c")
    harm(tmp_path / "c" / "step-000000009" / name)
    outs = resumed(tmp_path / "c", every=1000)
    assert len(outs[0].losses) == 12 - 6
    told = [one.getMessage() for one in caplog.records if "using the previous step instead" in one.message]
    assert len(told) == 2 and all("step-000000009" in text and said in text for text in told)
    assert same_bits(outs[0].model, train(RULE, 2, **CHOICES)[0].model)


def test_no_step_is_whole(tmp_path: Path) -> None:
    stopped(tmp_path)
    for number in (3, 6, 9):
        flip(tmp_path / f"step-00000000{number}" / "manifest.json")
        (tmp_path / f"step-00000000{number}" / "rank-001.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 3 steps of .* is whole: .*for a fresh start"):
        resumed(tmp_path)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_damaged_step_is_found_by_another_number_of_workers(workers: int, tmp_path: Path) -> None:
    stopped(tmp_path)
    flip(tmp_path / "step-000000009" / "rank-001.safetensors")
    outs = resumed(tmp_path, workers, every=1000)
    assert outs[0].minibatches >= 6 and sum(len(out.losses) for out in outs) >= 12


def test_what_is_not_ours_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stopped(tmp_path)
    (tmp_path / "thesis.tex").write_text("precious")
    (tmp_path / "step-000000003" / "notes.txt").write_text("precious")
    resumed(tmp_path, keep=1)
    assert (tmp_path / "thesis.tex").exists() and (tmp_path / "step-000000003" / "notes.txt").exists()
    assert any("notes.txt" in one.getMessage() for one in caplog.records)


# -- other runs' steps -------------------------------------------------------------------------------------------------
def fresh(path: Path, resume: Any = ..., steps_made: int = 2) -> paceline.Run:
    """A run of one worker that steps, with or without a resume before."""
    with attached(nn.Linear(2, 2), "bmuf(period=1)", adam, checkpoint=path, every_blocks=1) as (run, model, optimizer):
        try:
            if resume is not ...:
                run.resume(resume)
            for _ in range(steps_made):
                run.checkpoint()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        except BaseException:
            run.abandon()
            raise
    return run


def test_another_run_does_not_mix_with_what_is_there(tmp_path: Path) -> None:
    fresh(tmp_path)
    shutil.copytree(tmp_path / "step-000000002", tmp_path / "branch")
    there = steps(tmp_path)
    assert there[-1] == 2  # taken at the end, where what is being written is waited for
    with pytest.raises(CheckpointError, match=r"step-000000002 is of an earlier run; call run\.resume\(\) before"):
        fresh(tmp_path)
    with pytest.raises(CheckpointError, match=r"step-000000002 is of an earlier run"):
        fresh(tmp_path, tmp_path / "branch")
    assert steps(tmp_path) == there
    fresh(tmp_path, None)
    assert steps(tmp_path)[-1] == 4


def test_resume_says_whether_there_was_a_step(tmp_path: Path) -> None:
    with attached(nn.Linear(2, 2), "bmuf", adam, checkpoint=tmp_path / "new") as (run, model, _):
        assert run.resume() is False and not run.checkpoint()
    fresh(tmp_path / "old")
    with attached(model, "bmuf(period=1)", adam, checkpoint=tmp_path / "old") as (run, *_):
        assert run.resume() is True and run.minibatches == 2
    with attached(model, "bmuf(period=1)", adam) as (run, *_):
        assert run.resume(tmp_path / "old") is True and run.minibatches == 2
        with pytest.raises(CheckpointError, match=r"no path, and attach no checkpoint="):
            run.resume()


@pytest.mark.plugins
def test_what_attach_refuses(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for wrong in ({"every_blocks": 0}, {"keep": 0}, {"keep": True}, {"checkpoint": ""}, {"checkpoint": 3}):
        with pytest.raises(UnsupportedError, match=next(iter(wrong))):
            paceline.attach(model, adam(model.parameters()), "bmuf", **wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is no directory"):
        paceline.attach(model, adam(model.parameters()), "bmuf", checkpoint=tmp_path / "file")
    with pytest.raises(UnsupportedError, match="nothing://there cannot be opened"):
        paceline.attach(model, adam(model.parameters()), "bmuf", checkpoint="nothing://there")
    with pytest.raises(UnsupportedError, match=r"under asgd.*; call run\.save\(path\)"):
        simulate(Program("asgd", settings=kept(tmp_path / "c")), 2)


# -- what cannot be written --------------------------------------------------------------------------------------------
def test_a_full_disk_is_a_warning_on_all_and_the_last_step_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(RULE, 2, **CHOICES)
    stopped(tmp_path)
    monkeypatch.setattr(claim, "PROBE_BYTES", 1000)
    caplog.clear()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # what a file may grow to, as on a disk that is full
    try:
        outs = resumed(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(said) == 2 and all("could not be written" in text and "training goes on" in text for text in said)
    assert steps(tmp_path) == [3, 6, 9]
    assert same_bits(outs[0].model, whole[0].model)


@pytest.mark.parametrize("place", ["write_rank", "write_model", "sync_folder", "write_text", "_replace"])
def test_killed_at_any_place_of_writing(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kill leaves it: nothing that came after has happened."""
    stopped(tmp_path)

    class Killed(BaseException):
        pass

    def die(*arguments: Any, **more: Any) -> None:
        raise Killed

    monkeypatch.setattr(LocalDisk if place == "sync_folder" else saving, place, die)
    monkeypatch.setattr(DirectoryClaim, "take", lambda self: None)
    with pytest.raises(Killed):
        resumed(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "step-000000012.partial").exists()
    outs = resumed(tmp_path)
    assert len(outs[0].losses) == 12 - 9 and steps(tmp_path) == [6, 9, 12]
    assert same_bits(outs[0].model, train(RULE, 2, **CHOICES)[0].model)


def test_a_step_that_is_a_link_is_not_followed_and_a_place_that_is_one_is(tmp_path: Path) -> None:
    stopped(tmp_path / "real")
    (tmp_path / "place").symlink_to(tmp_path / "real")
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "real" / "step-000000009").rename(elsewhere)
    (tmp_path / "real" / "step-000000009").symlink_to(elsewhere)
    before = sorted(one.name for one in elsewhere.iterdir())
    outs = resumed(tmp_path / "place")
    assert len(outs[0].losses) == 12 - 6  # the step before it
    assert sorted(one.name for one in elsewhere.iterdir()) == before


TENSORS = {
    "half": torch.arange(5).to(torch.bfloat16),
    "empty": torch.zeros(0, 3),
    "number": torch.tensor(3.5, dtype=torch.float64),
    "whole": torch.arange(6).reshape(2, 3),
    "flags": torch.tensor([True, False]),
}


def test_a_bit_that_flips_while_a_checkpoint_is_written_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = LocalDisk.sync

    def flipped(self: LocalDisk, path: Path) -> None:
        if path.suffix == ".safetensors":
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        sync(self, path)

    monkeypatch.setattr(LocalDisk, "sync", flipped)
    found = files.write_rank(tmp_path, 0, files.Content({}, TENSORS, {}))
    with pytest.raises(CheckpointError, match=r"rank-000\.safetensors is damaged"):
        files.checked({"directory": str(tmp_path), "files": found}, "rank-000.safetensors")


@pytest.mark.parametrize("at", range(8, 310, 29))
def test_a_header_that_is_another_one_is_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    save_file = files.save_file

    def flipped(tensors: Any, file: Path) -> None:
        save_file(tensors, file)
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    monkeypatch.setattr(files, "save_file", flipped)
    header = tmp_path / "rank-000.safetensors"
    try:
        files.write_rank(tmp_path, 0, files.Content({}, TENSORS, {}))
    except CheckpointError as error:
        assert "its header is another one" in str(error)
    else:  # a type: the header is read, and says how the bytes are to be taken
        with pytest.raises(CheckpointError, match="no safetensors file"):
            files.read_tensors(header)

# SPDX-License-Identifier: Apache-2.0
"""A re-allocation that is broken off goes on after its last finished phase, and trusts no other file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _sources import Given, made_up
from safetensors.torch import save_file

from paceline import CheckpointError
from paceline_lightrnn import WordTable, reallocate
from paceline_lightrnn.allocation.progress import FILE

TABLE = WordTable.random(150, 12, 13)
PHASES = ["row prices", "row words", "column prices", "columns", "joint moves 1"]


class Broken(Exception):
    """The power goes out."""


def costs() -> Given:
    return made_up(150, 12, 13)


def broken_off(folder: Path, phase: str, exact: int = 0) -> None:
    """A re-allocation that ends when `phase` first says something."""

    def progress(name: str, done: int, total: int) -> None:
        if name == phase:
            raise Broken

    with pytest.raises(Broken):
        reallocate(costs(), TABLE, resume=folder, exact_words=exact, progress=progress)


@pytest.mark.parametrize("phase", PHASES)
def test_it_goes_on_after_the_last_finished_phase(tmp_path: Path, phase: str) -> None:
    broken_off(tmp_path, phase)
    told: list[str] = []
    found = reallocate(
        costs(), TABLE, resume=tmp_path, exact_words=0, progress=lambda name, done, total: told.append(name)
    )
    # The words of the rows are one phase with their prices.
    assert told[0] == ("row prices" if phase == "row words" else phase)
    straight = reallocate(costs(), TABLE, exact_words=0)
    assert found.table == straight.table
    assert (found.before, found.after) == (straight.before, straight.after)
    assert not any(tmp_path.iterdir())


def test_the_clock_goes_on_too(tmp_path: Path) -> None:
    broken_off(tmp_path, "columns")
    path = tmp_path / FILE
    before = reallocate(costs(), TABLE, exact_words=0).seconds
    text = path.read_bytes()
    assert b"seconds" in text
    assert reallocate(costs(), TABLE, resume=tmp_path, exact_words=0).seconds < 60 + before


def test_another_folder_is_made_and_the_exact_way_leaves_nothing(tmp_path: Path) -> None:
    reallocate(costs(), TABLE, resume=tmp_path / "deep" / "er")
    assert not any((tmp_path / "deep" / "er").iterdir())


def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path) -> None:
    broken_off(tmp_path, "columns")
    path = tmp_path / FILE
    whole = path.read_bytes()
    flipped = whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:]
    for damaged in (flipped, whole[:-9], whole[:40], b"", b"{}" * 50):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=FILE):
            reallocate(costs(), TABLE, resume=tmp_path, exact_words=0)
        assert path.read_bytes() == damaged


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(3)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match="another folder"):
        reallocate(costs(), TABLE, resume=tmp_path, exact_words=0)


def test_phases_of_other_arguments_are_refused(tmp_path: Path) -> None:
    broken_off(tmp_path, "columns")
    cells = TABLE.cells.clone()
    cells[[0, 1]] = cells[[1, 0]]
    with pytest.raises(CheckpointError, match="another table"):
        reallocate(costs(), TABLE.with_cells(cells), resume=tmp_path, exact_words=0)
    with pytest.raises(CheckpointError, match="seed is 0, here it is 1"):
        reallocate(costs(), TABLE, resume=tmp_path, exact_words=0, seed=1)
    with pytest.raises(CheckpointError, match="rows is 12, here it is 13"):
        reallocate(made_up(150, 13, 12), WordTable.random(150, 13, 12), resume=tmp_path, exact_words=0)
    with pytest.raises(CheckpointError, match="another costs"):
        reallocate(made_up(150, 12, 13, seed=1), TABLE, resume=tmp_path, exact_words=0)
    assert reallocate(costs(), TABLE, resume=tmp_path, exact_words=0).after > 0

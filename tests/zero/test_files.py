# SPDX-License-Identifier: Apache-2.0
"""Files of the ranks above 0: written apart, and found again by whoever wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from paceline.zero.files import Shadows
from paceline.zero.patches import Patches


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Rank 1 in a directory of its own; before leaving it the real files are looked at through `really`."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with Patches() as patches:
        Shadows(tmp_path / "logs", 1).install(patches)
        yield folder


def really(folder: Path) -> dict[str, int]:
    """Name -> size of what is there for everybody."""
    return {entry.name: entry.stat().st_size for entry in os.scandir(folder)}


def test_what_is_written_is_read_again_and_nobody_else_sees_it(work: Path) -> None:
    with open("log.txt", "w") as file:
        file.write("mine")
    Path("other.txt").write_text("mine too")
    torch.save({"a": torch.ones(2)}, "model.pt")
    np.save("array.npy", np.arange(3))
    safetensors.torch.save_file({"b": torch.zeros(1)}, "model.safetensors")
    assert really(work) == {}
    assert Path("log.txt").read_text() == "mine" and Path("other.txt").read_text() == "mine too"
    assert torch.load("model.pt", weights_only=True)["a"].tolist() == [1, 1]
    assert np.load("array.npy").tolist() == [0, 1, 2]
    assert safetensors.torch.load_file("model.safetensors")["b"].tolist() == [0]
    torch.save({"a": torch.zeros(1)}, f=work / "model.pt")
    assert torch.load(str(work / "model.pt"), weights_only=True)["a"].tolist() == [0]


def test_what_was_there_is_read_and_goes_on_apart(work: Path, tmp_path: Path) -> None:
    made = _made(tmp_path, "first\n")
    os.utime(made, (0, 0))
    os.link(made, work / "log.txt")
    assert Path("log.txt").read_text() == "first\n"
    with open("log.txt", "a") as file:
        file.write("second\n")
    assert Path("log.txt").read_text() == "first\nsecond\n"
    assert really(work) == {"log.txt": 6}
    with open("log.txt", "r+") as file:
        file.write("FIRST")
    assert Path("log.txt").read_text() == "FIRST\nsecond\n" and really(work) == {"log.txt": 6}


def test_what_rank_0_has_just_begun_is_not_taken_over(work: Path, tmp_path: Path) -> None:
    made = _made(tmp_path, "of rank 0\n")
    os.utime(made, (2e9, 2e9))
    os.link(made, work / "log.txt")
    assert Path("log.txt").read_text() == "of rank 0\n"
    with open("log.txt", "a") as file:
        file.write("mine\n")
    assert Path("log.txt").read_text() == "mine\n"


def _made(tmp_path: Path, text: str) -> str:
    """A file that somebody else has written."""
    place = tmp_path / "logs" / "made"
    place.parent.mkdir(exist_ok=True)
    place.write_text(text)  # in the log directory, which is written as it is said
    return str(place)


def test_moves_and_removals_stay_apart(work: Path, tmp_path: Path) -> None:
    os.link(_made(tmp_path, "keep"), work / "best.pt")
    torch.save([1], "best.tmp")
    os.replace("best.tmp", "best.pt")
    assert torch.load("best.pt", weights_only=True) == [1] and really(work) == {"best.pt": 4}
    os.remove("best.pt")
    os.remove("best.pt")  # rank 0's, which rank 0 removes
    assert really(work) == {"best.pt": 4} and Path("best.pt").read_text() == "keep"


def test_errors_are_the_programs_own(work: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Path("nowhere/log.txt").write_text("")
    with pytest.raises(FileNotFoundError):
        Path("missing.txt").read_text()
    with pytest.raises(ValueError, match="mode"):
        open("log.txt", "wr")  # noqa: SIM115


def test_what_is_no_file_of_the_program_goes_where_it_is_said(work: Path, tmp_path: Path) -> None:
    with open(os.devnull, "w") as file:
        file.write("nothing")
    reading, writing = os.pipe()
    with open(writing, "w") as out, open(reading) as back:
        out.write("through")
        out.close()
        assert back.read() == "through"
    (tmp_path / "logs").mkdir(exist_ok=True)
    (tmp_path / "logs" / "rank-001.jsonl").write_text("event")
    assert really(tmp_path / "logs") == {"rank-001.jsonl": 5}


def test_all_is_put_back(tmp_path: Path) -> None:
    before = open, torch.save, torch.load, os.replace, os.remove
    with Patches() as patches:
        Shadows(tmp_path, 2).install(patches)
        assert open is not before[0]
    assert (open, torch.save, torch.load, os.replace, os.remove) == before

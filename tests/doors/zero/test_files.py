# SPDX-License-Identifier: Apache-2.0
"""Files of the ranks above 0: written apart, and found again by whoever wrote them."""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import logging
import os
import pickle
import shutil
import sqlite3
import subprocess
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from paceline.doors.zero.file_redirection import FileRedirection
from paceline.doors.zero.patches import Patches

SCAN, LINK, MAKE_FOLDER = os.scandir, os.link, os.mkdir  # the system's own


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Rank 1 in a directory of its own; before leaving it the real files are looked at through `really`."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with Patches() as patches:
        (tmp_path / "logs").mkdir()
        FileRedirection(tmp_path / "logs", 1, began=time.time() + 3600).install(patches)
        yield folder


def really(folder: Path) -> dict[str, int]:
    """Name -> size of what is there for everybody."""
    return {entry.name: entry.stat().st_size for entry in SCAN(folder)}


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
    LINK(made, work / "log.txt")
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
    LINK(made, work / "log.txt")
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
    LINK(_made(tmp_path, "keep"), work / "best.pt")
    torch.save([1], "best.tmp")
    os.replace("best.tmp", "best.pt")
    assert torch.load("best.pt", weights_only=True) == [1] and really(work) == {"best.pt": 4}
    os.remove("best.pt")
    with pytest.raises(FileNotFoundError):
        os.remove("best.pt")
    os.remove("other.pt")  # rank 0 may have removed it already
    assert really(work) == {"best.pt": 4} and not Path("best.pt").exists()  # rank 0's is what rank 0 makes of it


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
        FileRedirection(tmp_path, 2).install(patches)
        assert open is not before[0]
    assert (open, torch.save, torch.load, os.replace, os.remove) == before


# -- everything by which a program makes files -------------------------------------------------------


def _by_export(path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(2, 1), (torch.zeros(1, 2),)), path)


def _by_script(path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 1)).save(str(path))


def _by_number(path: Path) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(number, b"x")
    os.close(number)


def _by_numpy(path: Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, a=np.arange(2))


def _by_database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.execute("create table t (a)")
        base.commit()


def _by_log(path: Path) -> None:
    handler = logging.FileHandler(path)
    handler.emit(logging.LogRecord("a", 20, "b", 1, "said", None, None))
    handler.close()


def _by_temporary_name(path: Path) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write("whole")
    os.replace(file.name, path)


def _by_archive(path: Path) -> None:
    Path("member").write_text("m")
    with tarfile.open(path, "w") as archive:
        archive.add("member")
    os.remove("member")


WRITERS: dict[str, Callable[[Path], object]] = {
    "touch": lambda path: path.touch(),
    "os.open": _by_number,
    "bytes": lambda path: open(os.fsencode(path), "wb").close(),
    "csv": lambda path: path.write_text("a,b\n"),
    "x": lambda path: open(path, "x").close(),
    "np.savez": _by_numpy,
    "np.savetxt": lambda path: np.savetxt(path, np.arange(2)),
    "memmap": lambda path: np.memmap(path, dtype="u1", mode="w+", shape=4).flush(),
    "tofile": lambda path: np.arange(2).tofile(path),
    "gzip": lambda path: gzip.open(path, "w").close(),
    "bz2": lambda path: bz2.open(path, "w").close(),
    "zip": lambda path: zipfile.ZipFile(path, "w").close(),
    "tar": _by_archive,
    "pickle": lambda path: path.write_bytes(pickle.dumps([1])),
    "old torch.save": lambda path: torch.save([1], path, _use_new_zipfile_serialization=False),
    "torch.jit": _by_script,
    "torch.export": _by_export,
    "safetensors.numpy": lambda path: safetensors.numpy.save_file({"a": np.zeros(2)}, path),
    "sqlite3": _by_database,
    "logging": _by_log,
    "temporary": _by_temporary_name,
    "symlink": lambda path: (
        Path("target").touch(),
        os.symlink("target", path),
        os.remove("target"),
        Path("target").touch(),
    ),
    "link": lambda path: (Path("source").touch(), os.link("source", path)),
    "mkdir": lambda path: path.mkdir(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_way_of_writing_stays_apart(writer: str, work: Path) -> None:
    path = work / "made"
    WRITERS[writer](path)
    assert "made" not in really(work)
    assert path.exists() and "made" in os.listdir() and "made" in {entry.name for entry in os.scandir(work)}
    assert [Path(found).name for found in glob.glob("ma*")] == ["made"] and list(work.glob("ma?e")) == [path]
    moved = work / "moved"
    shutil.move(path, moved)
    assert not path.exists() and moved.exists() and "moved" not in really(work)
    if moved.is_file():
        shutil.copy2(moved, work / "copy")
        assert "copy" not in really(work) and os.path.getsize("copy") == moved.stat().st_size
        moved.chmod(0o600)
        os.utime(moved, (5, 5))
        assert (moved.stat().st_mode & 0o777, os.path.getmtime("moved")) == (0o600, 5)
        moved.unlink()
    else:
        os.rmdir(moved)
    assert not moved.exists() and not os.path.lexists("moved")


def test_what_others_make_meanwhile_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "work"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "old.txt").write_text("old")
    monkeypatch.chdir(folder)
    _tick(folder)
    began = time.time()
    _tick(folder)
    for path in (folder / "runs" / "one", folder / "data" / "cache"):  # as rank 0 does
        path.mkdir(parents=True)
        (path / "half.txt").write_text("ha")
    (folder / "best.pt").write_text("of rank 0")
    with Patches() as patches:
        FileRedirection(tmp_path / "logs", 1, began).install(patches)
        assert os.listdir() == ["data"] and os.listdir("data") == ["old.txt"]
        assert [(at, folders, files) for at, folders, files in os.walk(".")] == [
            (".", ["data"], []),
            ("./data", [], ["old.txt"]),
        ]
        assert not os.path.exists("runs") and not Path("best.pt").is_file() and os.path.isdir("data")
        os.makedirs("runs/one")  # without exist_ok
        with pytest.raises(FileExistsError):
            os.mkdir("runs/one")
        with open("runs/one/log.txt", "w") as file:
            file.write("mine")
        Path("data/cache").mkdir()
        assert os.listdir("runs/one") == ["log.txt"] and os.listdir("data") == ["cache", "old.txt"]
        assert Path("best.pt").read_text() == "of rank 0"  # nobody writes it any more
        assert not os.path.exists("runs/one/half.txt")
    assert sorted(os.listdir("runs/one")) == ["half.txt"]


def _tick(folder: Path) -> None:
    """Until the clock of the file system has gone on."""
    first = (folder / "tick").touch() or os.stat(folder / "tick").st_ctime_ns
    while os.stat(folder / "tick").st_ctime_ns == first:
        (folder / "tick").touch()
    os.remove(folder / "tick")


def test_half_a_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writing = open("best.pt", "w")  # noqa: SIM115
    writing.write("half")
    writing.flush()
    with Patches() as patches:
        FileRedirection(tmp_path / "logs", 1, began=0.0).install(patches)
        with pytest.raises(FileNotFoundError):
            Path("best.pt").read_text()
        writing.close()
        assert Path("best.pt").read_text() == "half"


def test_a_directory_that_is_cleared_and_made_again(work: Path) -> None:
    MAKE_FOLDER(work / "out")
    MAKE_FOLDER(work / "out" / "deep")
    assert os.listdir("out") == ["deep"] and os.path.isdir("out/deep")
    shutil.rmtree("out")
    assert not os.path.exists("out") and not os.path.exists("out/deep")
    os.makedirs("out")
    Path("out/new.txt").write_text("x")
    assert os.listdir("out") == ["new.txt"] and "out" in really(work)
    shutil.rmtree("out")
    shutil.rmtree("out", ignore_errors=True)
    with pytest.raises(FileNotFoundError):
        shutil.rmtree("out")
    assert "deep" in really(work / "out")


def test_what_was_there_is_moved_and_copied_apart(work: Path, tmp_path: Path) -> None:
    LINK(_made(tmp_path, "old"), work / "last.pt")
    os.rename("last.pt", "kept.pt")
    assert Path("kept.pt").read_text() == "old" and not os.path.exists("last.pt")
    MAKE_FOLDER(work / "folder")
    os.replace("folder", "other")
    assert os.listdir() == ["kept.pt", "other"] and set(really(work)) == {"last.pt", "folder"}
    with pytest.raises(FileNotFoundError):
        os.rename("nowhere", "else")


def test_a_program_that_goes_elsewhere(work: Path) -> None:
    os.makedirs("outputs/run")
    os.chdir("outputs/run")
    assert os.getcwd() == str(work / "outputs" / "run") == os.path.abspath(".")
    Path("log.txt").write_text("mine")
    assert Path(os.getcwd(), "log.txt").read_text() == "mine" and os.path.exists(work / "outputs" / "run" / "log.txt")
    os.chdir("../..")
    assert os.listdir("outputs/run") == ["log.txt"] and really(work) == {}
    with pytest.raises(FileNotFoundError):
        os.chdir("nowhere")


@pytest.mark.processes
def test_temporary_files_are_given_to_other_programs_by_name(work: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.txt").write_text("for a child")
        said = subprocess.run(["cat", f"{folder}/a.txt"], capture_output=True, text=True, check=True).stdout
        assert said == "for a child" and "a.txt" in really(Path(folder))
    assert not os.path.exists(folder)


def test_temporary_files_are_everybodys_below_what_the_worker_wrote(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sockets of loader processes lie there, and native code binds them."""
    monkeypatch.setattr(tempfile, "tempdir", str(work.parent))
    Path("mine.txt").write_text("mine")  # now the temporary directory has a twin among the worker's own
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.txt").write_text("for native code")
        assert "a.txt" in really(Path(folder))
    assert really(work) == {}


@pytest.mark.processes
def test_what_a_child_makes_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Patches() as patches:
        FileRedirection(tmp_path / "logs", 1, began=time.time() - 3600).install(patches)
        assert os.system("mkdir -p out") == 0
        Path("out/log.txt").write_text("mine")
        assert os.listdir("out") == ["log.txt"]
    assert os.listdir("out") == []


def test_a_restart_goes_on_from_what_rank_0_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("last.pt").write_text("epoch 3")
    for read in ("epoch 3", "epoch 3"):
        with Patches() as patches:
            FileRedirection(tmp_path / "logs", 1, began=time.time() + 3600).install(patches)
            assert Path("last.pt").read_text() == read
            Path("last.pt").write_text("epoch 2")


def test_when_a_process_began_and_a_file_was_born(tmp_path: Path) -> None:
    from paceline.doors.zero.overlay import born, process_began

    assert 0 < time.time() - process_began() < 6 * 3600
    assert abs(process_began() - process_began()) < 1
    path = tmp_path / "file"
    path.touch()
    os.utime(path, (7, 7))
    birth = born(str(path))
    assert birth is None or abs(birth - time.time()) < 600
    assert born(str(tmp_path / "none")) is None


def test_directories_are_listed_in_order_on_rank_0(tmp_path: Path) -> None:
    from paceline.doors.zero.listing import in_order

    names = [f"{n * 7919 % 101:03d}" for n in range(40)]
    for name in names:
        (tmp_path / name).touch()
    with Patches() as patches:
        in_order(patches)
        assert os.listdir(tmp_path) == sorted(names) == [path.name for path in tmp_path.iterdir()]
        with os.scandir(tmp_path) as entries:
            assert [entry.name for entry in entries] == sorted(names)

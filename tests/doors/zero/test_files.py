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

from paceline_plugins.zero.file_redirection import redirect_files
from paceline_plugins.zero.journal import Journal
from paceline_plugins.zero.patches import Patches

SCAN, LINK, MAKE_FOLDER = os.scandir, os.link, os.mkdir  # the system's own
LATER_S = 3600.0


@contextlib.contextmanager
def worker(rank: int, folder: Path, began: float | None = None) -> Iterator[None]:
    """This process is a worker of that rank, with logs in `folder`, in a job that will begin in an hour."""
    with Patches() as patches:
        redirect_files(folder / "logs", rank, Journal(folder / "logs", BEGAN if began is None else began), patches)
        yield


BEGAN = time.time() + LATER_S


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Rank 1 in a directory of its own; before leaving it the real files are looked at through `really`."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (tmp_path / "logs").mkdir()
    with worker(1, tmp_path):
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
    with pytest.raises(FileNotFoundError):
        os.remove("other.pt")
    assert really(work) == {"best.pt": 4} and not Path("best.pt").exists()  # rank 0's is what rank 0 makes of it


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


def _by_h5py(path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file["a"] = [1, 2]
    import h5py

    with h5py.File(path) as file:
        assert file["a"][:].tolist() == [1, 2]


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
    "h5py": _by_h5py,
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
    with worker(1, tmp_path, began):
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
        with pytest.raises(FileNotFoundError):
            Path("best.pt").read_text()
        assert not os.path.exists("runs/one/half.txt")
    assert sorted(os.listdir("runs/one")) == ["half.txt"]


def _tick(folder: Path) -> None:
    """Until the clock of the file system has gone on."""
    first = (folder / "tick").touch() or os.stat(folder / "tick").st_ctime_ns
    while os.stat(folder / "tick").st_ctime_ns == first:
        (folder / "tick").touch()
    os.remove(folder / "tick")


@pytest.mark.processes
def test_temporary_files_are_given_to_other_programs_by_name(work: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.txt").write_text("for a child")
        said = subprocess.run(["cat", f"{folder}/a.txt"], capture_output=True, text=True, check=True).stdout
        assert said == "for a child" and "a.txt" in really(Path(folder))
    assert not os.path.exists(folder)


def test_an_own_link_leads_to_what_all_workers_share(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = work.parent / "logs" / "cache"
    cache.mkdir()
    os.symlink(cache, "cache")
    Path("cache/a.txt").write_text("shared")
    os.symlink("a.txt", "cache/b.txt")
    os.replace("cache/b.txt", "cache/c.txt")
    assert set(really(cache)) == {"a.txt", "c.txt"} and os.readlink("cache/c.txt") == "a.txt"
    os.remove("cache/c.txt")
    assert Path("cache/a.txt").read_text() == "shared" and really(work) == {}


@pytest.mark.processes
def test_what_a_child_makes_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with worker(1, tmp_path, began=time.time() - LATER_S):
        assert os.system("mkdir -p out") == 0
        Path("out/log.txt").write_text("mine")
        assert os.listdir("out") == ["log.txt"]
    assert os.listdir("out") == []


def test_directories_are_listed_in_order_on_rank_0(tmp_path: Path) -> None:
    from paceline_plugins.zero.file_redirection import in_order

    names = [f"{n * 7919 % 101:03d}" for n in range(40)]
    for name in names:
        (tmp_path / name).touch()
    with Patches() as patches:
        in_order(patches)
        assert os.listdir(tmp_path) == sorted(names) == [path.name for path in tmp_path.iterdir()]
        with os.scandir(tmp_path) as entries:
            assert [entry.name for entry in entries] == sorted(names)


# -- files that were there when the job began ---------------------------------------------------------
def _by_append(path: Path) -> None:
    with open(path, "a") as file:
        file.write("more")


def _by_update(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(2)
        file.write(b"new")


def _by_flags(flags: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        number = os.open(path, flags)
        os.write(number, b"NEW")
        os.close(number)

    return change


def _by_open_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    number = os.open(path.name, os.O_WRONLY, dir_fd=folder)
    os.write(number, b"NEW")
    os.close(number)
    os.rename(path.name, "beside", src_dir_fd=folder, dst_dir_fd=folder)
    os.symlink("beside", path.name, dir_fd=folder)
    os.close(folder)


def _by_memory(path: Path) -> None:
    mapped = np.memmap(path, dtype="u1", mode="r+")
    mapped[:3] = 65
    mapped.flush()


def _by_exchange(path: Path) -> None:
    path.with_name("exchange.tmp").write_text("whole")
    os.replace(path.with_name("exchange.tmp"), path)


def _by_second_name(path: Path) -> None:
    os.link(path, path.with_name("second"))
    with open(path.with_name("second"), "a") as file:
        file.write("through the other name")


def _by_link(path: Path) -> None:
    os.symlink(path.absolute(), path.with_name("points"))
    with open(path.with_name("points"), "r+") as file:
        file.write("THROUGH")


def _by_moved_folder(path: Path) -> None:
    folder = path.absolute().parent
    os.rename(folder, folder.with_name("moved"))
    _by_append(folder.with_name("moved") / path.name)
    os.rename(folder.with_name("moved"), folder)


CHANGES: dict[str, Callable[[Path], object]] = {
    "append": _by_append,
    "r+": _by_update,
    "w": lambda path: path.write_text("all new"),
    "O_WRONLY": _by_flags(os.O_WRONLY),
    "O_RDWR": _by_flags(os.O_RDWR),
    "O_APPEND": _by_flags(os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    "O_TRUNC": _by_flags(os.O_WRONLY | os.O_TRUNC),
    "os.truncate": lambda path: os.truncate(path, 3),
    "dir_fd": _by_open_folder,
    "memmap": _by_memory,
    "tofile": lambda path: np.arange(3, dtype="u1").tofile(path),
    "os.replace": _by_exchange,
    "os.link": _by_second_name,
    "os.symlink": _by_link,
    "copy over": lambda path: (path.with_name("a").write_text("copied"), shutil.copy(path.with_name("a"), path)),
    "move and back": lambda path: (shutil.move(path, f"{path}.old"), shutil.copy(f"{path}.old", path)),
    "remove": lambda path: (os.remove(path), path.write_text("made again")),
    "rmtree": lambda path: (shutil.rmtree(path.parent), os.makedirs(path.parent), path.write_text("made again")),
    "folder": _by_moved_folder,
    "sqlite3": lambda path: _insert(path),
    "sqlite3 URI": lambda path: _insert(f"file:{path.absolute()}?mode=rw", uri=True),
}


def _insert(path: Path | str, uri: bool = False) -> None:
    with contextlib.closing(sqlite3.connect(path, uri=uri)) as base:
        base.execute("insert into t values (2)")
        base.commit()


def _into(folder: Path) -> Path:
    os.chdir(folder / "deep" / "data")
    return Path("file")


def _own_link(target: Path, link: Path) -> Path:
    os.symlink(target, link)
    return link


ROUTES: dict[str, Callable[[Path], Path]] = {
    "its name": lambda work: Path("deep/data/file"),
    "its absolute name": lambda work: work / "deep" / "data" / "file",
    "a link": lambda work: Path("link"),
    "a link to its folder": lambda work: Path("folder/file"),
    "a link, and out again": lambda work: Path("folder/../data/file"),
    "an own link": lambda work: _own_link(work / "deep" / "data" / "file", work / "mine"),
    "an own link to its folder": lambda work: _own_link(work / "deep" / "data", work / "mine") / "file",
    "an own relative link": lambda work: _own_link(Path("../deep/data"), work / "deep" / "mine") / "file",
    "/proc/self/cwd": lambda work: Path("/proc/self/cwd/deep/data/file"),
    "its folder": _into,
}


def _old_files(work: Path, database: bool) -> None:
    (work / "deep" / "data").mkdir(parents=True)
    (work / "folder").symlink_to(work / "deep" / "data")
    (work / "link").symlink_to("deep/data/file")
    if database:
        with contextlib.closing(sqlite3.connect(work / "deep" / "data" / "file")) as base:
            base.execute("create table t (a)")
            base.commit()
    else:
        (work / "deep" / "data" / "file").write_text("what was there\n")


def _all(work: Path) -> dict[str, bytes]:
    """Path -> content of each file below, as this process sees it."""
    return {
        os.path.join(os.path.relpath(at, work), name): Path(at, name).read_bytes()
        for at, _, names in os.walk(work)
        for name in names
    }


AT_HOME = {"a link", "an own link", "its folder"}
"""Routes by which the folder is the working directory."""


def _after(work: Path, change: str, route: str) -> dict[str, bytes] | int | None:
    """The files after a change, or the error that it raised."""
    os.chdir(work)
    try:
        CHANGES[change](ROUTES[route](work))
    except OSError as error:
        return error.errno
    return _all(work)


def _beside_what_is_alone(change: str, place: Path) -> Iterator[tuple[Path, str, dict[str, bytes] | int | None]]:
    """A folder of old files by each route, and what the change comes to in another that no worker overlays."""
    for route in ROUTES.keys() - (AT_HOME if change in ("rmtree", "folder") else set()):
        alone, work = (place / route.strip("/") / name / "work" for name in ("alone", "beside"))
        for folder in (alone, work):
            _old_files(folder, database="sqlite3" in change)
        yield work, route, _after(alone, change, route)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_was_there_stays_apart_and_loses_nothing(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for work, route, expected in _beside_what_is_alone(change, tmp_path):
        before = _all(work)
        os.chdir(work)
        with worker(1, tmp_path):
            assert _after(work, change, route) == expected, route
        assert _all(work) == before, route


@pytest.mark.parametrize("change", CHANGES)
def test_what_rank_0_changes_first_is_for_the_others_as_it_was(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for work, route, expected in _beside_what_is_alone(change, tmp_path):
        before = _all(work)
        os.chdir(work)
        with worker(0, tmp_path):
            assert _after(work, change, route) == expected, route
        os.chdir(work)
        with worker(1, tmp_path):
            assert _all(work) == before, route
            assert _after(work, change, route) == expected, route


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("writer", WRITERS)
def test_what_rank_0_makes_is_not_there_for_the_others(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with worker(0, tmp_path):
        WRITERS[writer](tmp_path / "made")
        Path("after").mkdir()
        Path("after/file").write_text("x")
    assert os.path.lexists("made")
    with worker(1, tmp_path):
        assert os.listdir() == ["logs"] and not os.path.lexists("made") and not Path("after/file").exists()
        WRITERS[writer](tmp_path / "made")
        os.makedirs("after")
        assert os.listdir("after") == [] and os.path.lexists("made")

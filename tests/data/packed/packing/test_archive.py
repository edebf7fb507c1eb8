# SPDX-License-Identifier: Apache-2.0
"""Packing tar archives, also hostile ones."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from paceline_plugins.data.packed import DataError, open_source, pack
from paceline_plugins.data.packed.packing import Members

from ..made import back, by_key


def write(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def samples(path: Path, largest: int = 1 << 20) -> list[Members]:
    return [task() for task in open_source(str(path), largest).tasks(None)]


def test_members_that_follow_each_other_are_a_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", ("x/1.jpg", b"1"), ("x/1.seg.PNG", b"2"), ("x/2.jpg", b"3"), ("README", b"4"))
    assert samples(path) == [
        {"jpg": b"1", "seg.png": b"2", "source.json": b'{"key": "x/1"}'},
        {"jpg": b"3", "source.json": b'{"key": "x/2"}'},
        {"bin": b"4", "source.json": b'{"key": "README"}'},
    ]


def test_members_that_do_not_follow_each_other_are_noted(tmp_path: Path) -> None:
    apart = open_source(str(write(tmp_path / "a.tar", ("1.a", b""), ("2.a", b""), ("1.b", b""), ("2.b", b""))))
    assert len(list(apart.tasks(None))) == 4
    assert apart.progress.notes[0].startswith("every sample has one member (a, b)")
    together = open_source(str(write(tmp_path / "a.tar", ("1.a", b""), ("1.b", b""), ("2.a", b""))))
    assert len(list(together.tasks(None))) == 2
    assert together.progress.notes == []


def test_paths_in_names_write_no_files(tmp_path: Path) -> None:
    work = tmp_path / "deep" / "work"
    work.mkdir(parents=True)
    outside = tmp_path / "evil.txt"
    path = write(work / "a.tar", ("../../evil.txt", b"1"), (str(outside), b"2"))
    pack(open_source(str(path)), work / "out")
    assert sorted(os.listdir(tmp_path)) == ["deep"]
    assert sorted(os.listdir(work)) == ["a.tar", "out"]
    assert sorted(by_key(back(work / "out"))) == sorted(["../../evil", str(outside.with_suffix(""))])


def test_errors_of_a_tar_name_file_and_byte(tmp_path: Path) -> None:
    twice = write(tmp_path / "twice.tar", ("1.jpg", b"1"), ("1.JPG", b"2"))
    with pytest.raises(DataError, match=r"twice\.tar at byte 1024: '1\.JPG' is the sample's second member"):
        samples(twice)
    large = write(tmp_path / "large.tar", ("1.a", bytes(600)), ("1.b", bytes(600)))
    with pytest.raises(DataError, match=r"large\.tar at byte 1536: the sample of '1\.b' has more than 1000 bytes"):
        samples(large, 1000)
    with pytest.raises(DataError, match=r"large\.tar at byte 0: '1\.a' has 600 bytes, more than"):
        samples(large, 500)
    (tmp_path / "no.tar").write_bytes(b"this is no archive" * 100)
    with pytest.raises(DataError, match=r"no\.tar at byte 0: no tar header here"):
        samples(tmp_path / "no.tar")


def test_a_decompression_bomb_is_refused_by_its_header(tmp_path: Path) -> None:
    """2 GB of zeros in some MB of gzip: the header is enough to refuse it."""
    path = tmp_path / "bomb.tar.gz"
    info = tarfile.TarInfo("bomb.bin")
    info.size = 2 << 30
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(info.tobuf())
        file.write(bytes(1 << 20))
    with pytest.raises(DataError, match="more than the largest sample"):
        samples(path)

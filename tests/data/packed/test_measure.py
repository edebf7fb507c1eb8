# SPDX-License-Identifier: Apache-2.0
"""What a storage holds, and measurements that really read it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_plugins.data.packed import DataError, measure
from paceline_plugins.data.packed.measure import first_byte_s, inspect, read_speed
from paceline_plugins.data.packed.storage import Storage

from .made import folder, index_of, packed


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """A packed data set in fsspec's memory."""
    import fsspec

    url = f"memory://{uuid.uuid4().hex}"
    system = fsspec.filesystem("memory")
    for path in packed(tmp_path).iterdir():
        system.pipe_file(f"{url}/{path.name}", path.read_bytes())
    yield url
    system.rm(url, recursive=True)


def test_the_index_gives_the_size_of_samples(tmp_path: Path) -> None:
    place = packed(tmp_path)
    index, found = index_of(place), inspect(Storage(str(place)))
    assert found.kind == "packed"
    assert found.bytes == index.total_bytes
    assert found.bytes_per_sample == index.total_bytes / 20
    assert found.files == tuple((shard.name, shard.bytes) for shard in index.shards)
    assert found.file_bytes == index.total_bytes / len(index.shards)


def test_of_many_files_only_some_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, 10)
    monkeypatch.setattr(measure, "MOST_FILES", 5)
    found = inspect(Storage(str(tmp_path)))
    assert len(found.files) <= 5
    assert found.bytes is None
    assert "only the first 5 files were looked at" in found.notes


@pytest.mark.parametrize("far", [False, True])
def test_the_speed_counts_the_bytes_read(tmp_path: Path, remote: str, far: bool) -> None:
    place = Storage(remote if far else str(tmp_path / "packed"))
    found = inspect(place)
    assert first_byte_s(place, found) > 0
    for readers in (1, 3):
        measured = read_speed(place, found, readers, 0.05)
        assert measured.readers == readers
        assert measured.files >= readers
        assert measured.seconds >= 0.05
        assert 0 < measured.bytes <= measured.files * max(size for _, size in found.files)
        assert measured.bytes_s == measured.bytes / measured.seconds


def test_a_storage_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    place = Storage(str(packed(tmp_path)))
    found = inspect(place)
    release = threading.Event()

    def hang(*_: object) -> Iterator[int]:
        release.wait(60)
        yield 0

    monkeypatch.setattr(measure, "STALL_S", 0.05)
    monkeypatch.setattr(measure, "_pieces", hang)
    try:
        with pytest.raises(DataError, match="1 of 1 readers had no answer"):
            first_byte_s(place, found)
    finally:
        release.set()

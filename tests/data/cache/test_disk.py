# SPDX-License-Identifier: Apache-2.0
"""Disks that are full, gone, read-only or that corrupt files."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_plugins.data.cache import Cache, CacheError
from tests.data.cache.server import Server

BODY = bytes(range(256)) * 16
MB = 1 << 20


def only_file(directory: Path) -> Path:
    (path,) = directory.glob("f-*")
    return path


@pytest.mark.parametrize("checksums", [True, False])
def test_a_file_whose_bits_changed_on_disk_is_fetched_again(tmp_path: Path, checksums: bool) -> None:
    with Server(checksums=checksums) as server:
        url = server.put("a", BODY)
        with Cache(tmp_path) as cache:
            cache.read(url)
        path = only_file(tmp_path)
        path.write_bytes(BODY[:-1] + b"?")
        with Cache(tmp_path) as cache:
            assert cache.read(url) == BODY
            assert cache.stats()[server.address].corrupt == 1
        assert server.requests["a"] == 2


def test_a_file_with_damaged_metadata_is_a_miss(server: Server, tmp_path: Path) -> None:
    url = server.put("a", BODY)
    with Cache(tmp_path, 5000) as cache:
        cache.read(url)
        (meta,) = tmp_path.glob("*.meta")
        meta.write_text('{"url": ')
        assert cache.read(url) == BODY
        assert cache.read(server.put("b", BODY)) == BODY
    assert server.requests["a"] == 2


@pytest.mark.parametrize("directory", ["file/cache", "/proc/cache"])
def test_a_directory_that_cannot_be_made(tmp_path: Path, directory: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError, match=r"the cache directory .*cache"):
        Cache(tmp_path / directory)


def test_a_directory_that_cannot_be_written(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, flags: int, *rest: object, **named: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    with Cache(tmp_path) as cache:
        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(CacheError, match=rf"{tmp_path} cannot be written.*Permission denied.*directory="):
            cache.read(server.put("a", BODY))


@pytest.fixture
def tiny(real_processes: None, tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_evicts_old_files(server: Server, tiny: Path) -> None:
    urls = [server.put(f"{i}.bin", bytes([i]) * MB) for i in range(6)]
    with Cache(tiny) as cache:
        for url in urls:
            assert len(cache.read(url)) == MB
        there = cache.cached(urls)
        assert urls[5] in there and urls[0] not in there and len(there) >= 2
        big = server.put("big", b"x" * (3 * MB))
        assert len(cache.read(big)) == 3 * MB


def test_a_disk_that_fills_in_the_middle_of_a_write(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same without a mount: the third file meets a full disk until one of the first two is evicted."""
    from paceline_plugins.data.cache import download

    original = download.write_all

    def write(file: object, chunk: bytes) -> None:
        if len(list(tmp_path.glob("f-*"))) >= 2:
            raise OSError(28, "No space left on device")
        original(file, chunk)

    monkeypatch.setattr(download, "write_all", write)
    urls = [server.put(str(i), BODY) for i in range(3)]
    with Cache(tmp_path) as cache:
        assert [cache.read(url) for url in urls] == [BODY] * 3
        assert cache.cached(urls) == set(urls[1:])
        assert cache.stats()[server.address].retries == 0

# SPDX-License-Identifier: Apache-2.0
"""Hits and misses, eviction, pinned files, and a cap that holds at every write."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline_plugins.data.cache import Cache, CacheError, NotServedError, download, http_backend
from paceline_plugins.data.cache.names import extension, file_name
from tests.data.cache.server import Server

KB = 1000


def bytes_in(directory: Path) -> int:
    """Bytes of complete files and of downloads under way."""
    total = 0
    for path in directory.iterdir():
        if path.name.startswith("f-") or path.suffix == ".part":
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total


def urls_of(server: Server, count: int, size: int = KB) -> list[str]:
    return [server.put(f"{i}.bin", bytes([i]) * size) for i in range(count)]


class Peak:
    """The most bytes that the directory held after any write."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes, self._lock = 0, threading.Lock()
        original = download.write_all

        def write(file: Any, chunk: bytes) -> None:
            original(file, chunk)
            with self._lock:
                self.bytes = max(self.bytes, bytes_in(directory))

        monkeypatch.setattr(download, "write_all", write)
        monkeypatch.setattr(http_backend, "CHUNK_BYTES", 100)


def test_a_file_is_fetched_once(server: Server, tmp_path: Path) -> None:
    url = server.put("a/b.tar.gz", b"hello")
    with Cache(tmp_path) as cache:
        assert cache.read(url) == cache.read(url) == b"hello"
        with cache.open(url) as path:
            assert path.parent == tmp_path and path.name.endswith(".tar.gz")
        stats = cache.stats()[server.address]
    assert server.requests["a/b.tar.gz"] == 1
    assert (stats.hits, stats.misses, stats.fetched_bytes, stats.retries, stats.corrupt) == (2, 1, 5, 0, 0)
    assert stats.waited_s > 0


def test_files_survive_a_restart(server: Server, tmp_path: Path) -> None:
    url = server.put("a", b"hello")
    with Cache(tmp_path) as cache:
        cache.read(url)
    with Cache(tmp_path) as again:
        assert again.cached([url, server.url("b")]) == {url}
        assert again.read(url) == b"hello"
    assert server.requests["a"] == 1


def test_a_local_path_is_opened_in_place(tmp_path: Path) -> None:
    file = tmp_path / "a file.txt"
    file.write_bytes(b"here")
    with Cache(tmp_path / "cache") as cache:
        for url in (str(file), file.as_uri()):
            with cache.open(url) as path:
                assert path == file
        with cache.open(str(file), hashlib.sha256(b"here").hexdigest()) as path:
            assert path == file
        with pytest.raises(NotServedError, match="SHA-256"), cache.open(str(file), "0" * 64):
            pass
        with pytest.raises(NotServedError, match="no such file"), cache.open(str(tmp_path / "none")):
            pass
        assert cache.stats() == {} and not list(cache.directory.glob("f-*"))


def test_the_least_recently_used_file_is_evicted_first(server: Server, tmp_path: Path) -> None:
    urls = urls_of(server, 5)
    with Cache(tmp_path, 3 * KB) as cache:
        for url in urls[:3]:
            cache.read(url)
        cache.read(urls[0])
        cache.read(urls[3])
        assert cache.cached(urls) == {urls[0], urls[2], urls[3]}
        cache.read(urls[4])
        assert cache.cached(urls) == {urls[0], urls[3], urls[4]}


def test_files_of_unknown_size_go_above_the_cap_one_at_a_time(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = urls_of(server, 16)
    for url in urls:
        server.fail(url.rpartition("/")[2], *["unsized"] * 99)
    peak = Peak(tmp_path, monkeypatch)
    with Cache(tmp_path, 3 * KB) as cache, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(cache.read, urls)) == [server.bodies[u.rpartition("/")[2]] for u in urls]
    assert 3 * KB < peak.bytes <= 4 * KB
    assert bytes_in(tmp_path) <= 3 * KB


def test_a_file_larger_than_the_cap_names_both_sizes(server: Server, tmp_path: Path) -> None:
    known, unknown = server.put("known", b"x" * 3000), server.put("unknown", b"x" * 3000)
    server.fail("unknown", "unsized")
    with Cache(tmp_path, 2000) as cache:
        for url in (known, unknown):
            with pytest.raises(CacheError, match=r"3000 bytes.*2000"), cache.open(url):
                pass
        assert bytes_in(tmp_path) == 0


def test_an_open_file_is_never_evicted(server: Server, tmp_path: Path) -> None:
    urls = urls_of(server, 5)
    with Cache(tmp_path, 2 * KB) as cache, cache.open(urls[0]) as path:
        for url in urls[1:]:
            cache.read(url)
        assert path.read_bytes() == bytes(KB)
    assert server.requests["0.bin"] == 1


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/a.tar", ".tar"),
        ("s3://bucket/a.tar.gz", ".tar.gz"),
        ("https://host/a.npy?signature=x/../y.sh", ".npy"),
        ("https://host/v1.2/file", ""),
        ("https://host/..", ""),
        ("https://host/a.%2e%2e", ""),
        ("https://host/a.tar/../../etc", ""),
        ("https://host/.hidden", ""),
        ("https://host/a." + "x" * 40, ""),
    ],
)
def test_only_a_harmless_extension_gets_into_a_file_name(url: str, expected: str) -> None:
    assert extension(url) == expected
    assert "/" not in file_name(url) and len(file_name(url)) < 60


@pytest.mark.parametrize("wrong", [{"cap_bytes": 0}, {"threads": 0}, {"retries": -1}, {"timeout_s": 0.0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Cache(tmp_path, **wrong)


def test_a_failed_download_leaves_no_files(server: Server, tmp_path: Path) -> None:
    with Cache(tmp_path) as cache:
        with pytest.raises(NotServedError):
            cache.read(server.url("none"))
    assert {path.name for path in tmp_path.iterdir()} == {"ledger"}

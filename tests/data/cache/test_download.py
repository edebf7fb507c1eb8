# SPDX-License-Identifier: Apache-2.0
"""Downloads that fail: retried where that may help, never served when corrupt."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import pytest

from paceline_plugins.data.cache import Cache, CacheError, CorruptFileError, NotServedError
from paceline_plugins.data.cache.checksums import digest_of
from tests.data.cache.server import Server
from tests.waiting import until

BODY = bytes(range(256)) * 16


@pytest.mark.parametrize("fault", ["cut", "flip"])
def test_a_corrupt_download_is_retried(server: Server, tmp_path: Path, fault: str) -> None:
    url = server.put("a", BODY)
    server.fail("a", fault, fault)
    with Cache(tmp_path) as cache:
        assert cache.read(url) == BODY
        stats = cache.stats()[server.address]
    assert server.requests["a"] == 3 and stats.retries == 2
    assert stats.corrupt == (2 if fault == "flip" else stats.corrupt)


def test_a_download_that_is_always_corrupt_is_never_served(server: Server, tmp_path: Path) -> None:
    url = server.put("a", BODY)
    server.fail("a", *["flip"] * 9)
    right = hashlib.md5(BODY).hexdigest()
    wrong = hashlib.md5(BODY[:2048] + bytes([BODY[2048] ^ 1]) + BODY[2049:]).hexdigest()
    with Cache(tmp_path, retries=2) as cache:
        with pytest.raises(CorruptFileError, match=rf"{url} came wrong 3 times: md5:{right} expected, {wrong} seen"):
            cache.read(url)
        assert cache.cached([url]) == set() and cache.stats()[server.address].corrupt == 3
    assert server.requests["a"] == 3
    assert not list(tmp_path.glob("f-*")) and not list(tmp_path.glob("*.part"))


def test_a_file_without_checksum_has_one_of_its_own(tmp_path: Path) -> None:
    with Server(checksums=False) as server:
        url = server.put("a", BODY)
        with Cache(tmp_path) as cache:
            assert cache.read(url) == BODY
        (meta,) = tmp_path.glob("*.meta")
        algorithm, _, digest = json.loads(meta.read_text())["source"].partition(":")
        (file,) = tmp_path.glob("f-*")
        assert algorithm in ("crc32c", "crc32") and digest == digest_of(file, algorithm)
        server.fail("b", "cut")
        with Cache(tmp_path) as cache:
            assert cache.read(server.put("b", BODY)) == BODY and server.requests["b"] == 2


def test_a_prefetched_file_larger_than_the_last_one_is_reserved_in_full(server: Server, tmp_path: Path) -> None:
    urls = [server.put(name, bytes(size)) for name, size in (("a", 1000), ("b", 1000), ("c", 3000))]
    with Cache(tmp_path, 4000, threads=1) as cache:
        cache.prefetch(urls)
        until(lambda: server.requests["c"] == 1, "the last file was not asked for")
        assert cache.cached(urls) == set(urls[:2])  # all three do not fit, and the first two are still to be opened
        for url in urls:
            cache.read(url)


def test_the_caller_s_checksum_is_enforced(tmp_path: Path) -> None:
    with Server(checksums=False) as server:
        url = server.put("a", BODY)
        server.fail("a", "flip")
        with Cache(tmp_path, retries=1) as cache:
            with cache.open(url, hashlib.sha256(BODY).hexdigest().upper()) as path:
                assert path.read_bytes() == BODY
            assert server.requests["a"] == 2
            with pytest.raises(CorruptFileError, match="sha256:" + "0" * 64 + " expected"), cache.open(url, "0" * 64):
                pass
            assert cache.cached([url]) == {url}, "a wrong checksum of one caller must not evict the file"


def test_another_version_than_the_cached_one_is_fetched_if_the_caller_names_it(server: Server, tmp_path: Path) -> None:
    url = server.put("a", b"old")
    with Cache(tmp_path) as cache:
        cache.read(url)
        server.put("a", b"new")
        assert cache.read(url) == b"old"
        with cache.open(url, hashlib.sha256(b"new").hexdigest()) as path:
            assert path.read_bytes() == b"new"


@pytest.mark.parametrize(("code", "cure"), [(404, "check the url"), (403, "credentials"), (410, "check the url")])
def test_a_refusal_is_final(server: Server, tmp_path: Path, code: int, cure: str) -> None:
    url = server.put("a", BODY)
    server.fail("a", code)
    with Cache(tmp_path) as cache:
        with pytest.raises(NotServedError, match=rf"{url}.*{code}.*{cure}"):
            cache.read(url)
    assert server.requests["a"] == 1


def test_a_server_that_stalls_is_retried(server: Server, tmp_path: Path) -> None:
    url = server.put("a", BODY)
    server.fail("a", "hold", "hold")
    with Cache(tmp_path, timeout_s=0.2, retries=99) as cache:
        assert cache.read(url) == BODY and server.requests["a"] >= 3
    with Cache(tmp_path, timeout_s=0.2, retries=2) as cache:
        server.fail("b", *["hold"] * 9)
        with pytest.raises(CacheError, match="did not answer 3 times: no answer in time"):
            cache.read(server.put("b", BODY))


def test_pauses_grow_and_differ(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline_plugins.data.cache import download

    monkeypatch.setattr(download, "FIRST_PAUSE_S", 8.0)
    url = server.put("a", BODY)
    server.fail("a", *[503] * 4)
    with Cache(tmp_path, retries=4) as cache:
        pauses: list[float] = []

        def wait(seconds: float) -> bool:
            pauses.append(seconds)
            return False

        monkeypatch.setattr(cache._downloader.closed, "wait", wait)
        cache.read(url)
    for pause, longest in zip(pauses, [8, 16, 20, 20], strict=True):  # doubled, up to the longest
        assert longest / 2 <= pause <= longest
    assert pauses[2] != pauses[3]


def test_cached_files_are_served_while_their_source_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Server() as server:
        urls = [server.put(str(i), bytes([i])) for i in range(4)]
        cache = Cache(tmp_path, retries=1, timeout_s=5)
        for url in urls[:3]:
            cache.read(url)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        assert [cache.read(url) for url in urls[:3] * 2] == [b"\0", b"\1", b"\2"] * 2
        for _ in range(2):
            with pytest.raises(CacheError, match=f"{server.address} did not answer"):
                cache.read(urls[3])
        assert cache.read(urls[0]) == b"\0"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and server.address in said[0]
    cache.close()


def test_secrets_in_urls_stay_out_of_messages(server: Server, tmp_path: Path) -> None:
    url = server.address.replace("//", "//user:word@") + "/none?signature=secret"
    with Cache(tmp_path) as cache:
        with pytest.raises(NotServedError) as caught:
            cache.read(server.url("none") + "?signature=secret")
        assert "secret" not in str(caught.value)
        server.fail("none", *[503] * 9)
        from paceline.checkpoint.urls import shown, source_of

        assert source_of(url) == server.address and shown(url) == server.url("none")

# SPDX-License-Identifier: Apache-2.0
"""Backends: the choice by URL, sizes and checksums, refusals."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.urls import local_path, source_of
from paceline_plugins.data.cache import Cache, CorruptFileError, NotServedError
from paceline_plugins.data.cache.checksums import Checksum
from paceline_plugins.data.cache.download import backend_for
from paceline_plugins.data.cache.http_backend import checksum_of
from tests.data.cache.conftest import SHA

MD5 = hashlib.md5(b"x").hexdigest()
MD5_64, SHA_64 = (base64.b64encode(bytes.fromhex(digest)).decode() for digest in (MD5, SHA))


@pytest.mark.parametrize(
    ("url", "path", "name"),
    [
        ("/a/b c", "/a/b c", "file://"),
        ("a:b", "a:b", "file://"),
        ("file:///a/b%20c", "/a/b c", "file://"),
        ("s3://bucket/key", None, "s3://bucket"),
        ("HTTPS://user:pw@host:8/x?y", None, "https://host:8"),
        ("memory://a/b", None, "memory://a"),
        ("abfss://container@account.dfs.core.windows.net/x", None, "abfss://container@account.dfs.core.windows.net"),
    ],
)
def test_paths_and_names_of_sources(url: str, path: str | None, name: str) -> None:
    assert local_path(url) == (Path(path) if path else None) and source_of(url) == name


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Content-MD5": MD5_64}, f"md5:{MD5}"),
        ({"Repr-Digest": f"sha-256=:{SHA_64}:"}, f"sha256:{SHA}"),
        ({"Digest": f"sha-256={SHA_64}"}, f"sha256:{SHA}"),
        ({"x-amz-checksum-sha256": SHA_64}, f"sha256:{SHA}"),
        ({"x-amz-meta-sha256": SHA.upper(), "Content-MD5": MD5_64}, f"sha256:{SHA}"),
        ({"x-goog-hash": f"crc32c=AAAAAA==,md5={MD5_64}"}, "crc32c:00000000"),
        ({"x-goog-hash": f"md5={MD5_64}"}, f"md5:{MD5}"),
        ({"x-amz-checksum-crc32": "AAAAAA==", "ETag": f'"{MD5}"', "x-amz-request-id": "1"}, "crc32:00000000"),
        ({"x-amz-checksum-crc32": "AAAAAA==-2", "Content-MD5": MD5_64}, f"md5:{MD5}"),
        ({"x-amz-checksum-crc32c": "AAAAAA==", "x-amz-meta-sha256": SHA}, "crc32c:00000000"),
        ({"ETag": f'"{MD5}"', "x-amz-request-id": "1"}, f"md5:{MD5}"),
        ({"ETag": f'"{MD5}-2"', "x-amz-request-id": "1"}, None),
        ({"ETag": f'"{MD5}"'}, None),
        ({"ETag": f'"{MD5}"', "x-amz-request-id": "1", "x-amz-server-side-encryption": "aws:kms"}, None),
        ({"Content-MD5": MD5_64, "Content-Encoding": "gzip"}, None),
        ({"Content-MD5": "?"}, None),
        ({}, None),
    ],
)
def test_checksums_in_headers(headers: dict[str, str], expected: str | None) -> None:
    if expected == "crc32c:00000000":
        pytest.importorskip("google_crc32c")
    message = Message()
    for key, value in headers.items():
        message[key] = value
    found = checksum_of(message)  # type: ignore[arg-type]
    assert (str(found) if found else None) == expected


@pytest.fixture
def memory() -> Iterator[Any]:
    import fsspec

    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()


def test_a_file_system_of_fsspec(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/folder/a.bin", b"hello")
    with Cache(tmp_path) as cache:
        assert cache.read("memory://folder/a.bin") == b"hello"
        memory.rm("/folder/a.bin")
        assert cache.read("memory://folder/a.bin") == b"hello"
        with pytest.raises(NotServedError, match="no such file"):
            cache.read("memory://folder/b.bin")
        with pytest.raises(NotServedError, match="folder"):
            cache.read("memory://folder")
        assert cache.stats()["memory://folder"].fetched_bytes == 5


def test_errors_of_a_file_system_are_retried(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/a", b"hello")
    left, original = [OSError("reset"), TimeoutError("slow")], type(memory).info

    def info(self: Any, path: str, **rest: Any) -> Any:
        if left:
            raise left.pop()
        return original(self, path, **rest)

    monkeypatch.setattr(type(memory), "info", info)
    with Cache(tmp_path) as cache:
        assert cache.read("memory://a") == b"hello" and cache.stats()["memory://a"].retries == 2


def test_an_object_store(s3: dict[str, str], tmp_path: Path) -> None:
    with Cache(tmp_path, options=s3) as cache:
        assert cache.read("s3://bucket/dir/a b.bin") == b"hello"
        assert cache.read("s3://bucket/100%?#.bin") == b"percent"
        with pytest.raises(NotServedError, match=r"s3://bucket/none: there is no such object"):
            cache.read("s3://bucket/none")


def test_checksums_of_an_object_store(s3: dict[str, str]) -> None:
    source = backend_for("s3://bucket/x", s3, 10.0)
    with source.begin("s3://bucket/dir/a b.bin") as remote:
        assert (remote.size, remote.checksum) == (5, Checksum("md5", hashlib.md5(b"hello").hexdigest()))
        assert b"".join(remote.chunks) == b"hello"
    with source.begin("s3://bucket/signed") as remote:
        assert remote.checksum == Checksum("sha256", SHA)


def test_a_crc32c_in_the_metadata_replaces_the_etag(s3: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("google_crc32c")
    with Cache(tmp_path, options=s3, retries=1) as cache:
        assert cache.read("s3://bucket/crc32c") == b"123456789"
        with pytest.raises(CorruptFileError, match="crc32c:00000000 expected, e3069283 seen"):
            cache.read("s3://bucket/wrong-crc32c")
        with cache.open("s3://bucket/crc32c") as path:
            path.write_bytes(b"123456780")
    with Cache(tmp_path, options=s3) as again:
        assert again.read("s3://bucket/crc32c") == b"123456789"
        assert again.stats()["s3://bucket"].corrupt == 1

# SPDX-License-Identifier: Apache-2.0
"""Bodies over HTTP without TLS, from the socket: the same bytes, progress on slow links, ends and stalls."""

from __future__ import annotations

import hashlib
import random
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline_plugins.data.cache import Cache, NotServedError
from paceline_plugins.data.cache.backend import RemoteFile
from paceline_plugins.data.cache.download import backend_for
from paceline_plugins.data.cache.http_backend import HttpBackend
from paceline_plugins.data.cache.obstore_backend import ObstoreBackend
from paceline_plugins.data.cache.plain_body import PIECE_BYTES, has_plain_body
from tests.data.cache.server import Server

LARGE = random.Random(0).randbytes(2 * PIECE_BYTES + 3)


def test_the_bytes_in_large_pieces(server: Server) -> None:
    for name, body in {"large": LARGE, "small": b"abc", "empty": b""}.items():
        with HttpBackend({}, 60.0).begin(server.put(name, body)) as remote:
            pieces = list(remote.chunks)
        assert b"".join(pieces) == body and max(map(len, pieces), default=0) <= PIECE_BYTES
        assert len(pieces) <= len(body) // PIECE_BYTES + 2  # one more for what came with the headers


def test_a_body_of_unknown_size_is_read_by_http(server: Server) -> None:
    server.put("unsized", b"abc")
    server.fail("unsized", "unsized")
    with closing(urllib.request.urlopen(server.url("unsized"), timeout=60)) as answer:
        assert not has_plain_body(answer) and answer.read() == b"abc"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who was asked: "obstore" or "http", in turn."""
    found: list[str] = []

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found.append(name)
            return method(*arguments)

        return call

    monkeypatch.setattr(HttpBackend, "begin", noted("http", HttpBackend.begin))
    monkeypatch.setattr(ObstoreBackend, "_begin_obstore", noted("obstore", ObstoreBackend._begin_obstore))
    return found


def read(source: Any, name: str) -> tuple[RemoteFile, bytes]:
    with source.begin(f"s3://bucket/{name}") as remote:
        return remote, b"".join(remote.chunks)


def test_large_objects_come_without_obstore_and_small_ones_with_it(s3: dict[str, str], asked: list[str]) -> None:
    source = backend_for("s3://bucket/x", s3, 60.0)
    by_obstore = backend_for("s3://bucket/x", {**s3, "client_options": {}}, 60.0)
    for name in ("large", "signed", "100%?#.bin", "large", "large"):
        asked.clear()
        remote, body = read(source, name)
        other, same = read(by_obstore, name)
        assert (remote.size, remote.checksum, body) == (other.size, other.checksum, same)
    assert hashlib.md5(body).hexdigest() == str(remote.checksum).removeprefix("md5:")
    assert asked == ["http", "obstore"]  # of the last object: the one before was large, too


def test_obstore_takes_over_where_a_signed_url_is_refused(
    s3: dict[str, str], asked: list[str], tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore

    monkeypatch.setattr(obstore, "sign", lambda *_: server.url("nowhere"))
    with Cache(tmp_path / "refused", options=s3) as cache:
        assert cache.read("s3://bucket/signed") == b"x" and asked == ["http", "obstore"]
    monkeypatch.undo()
    with Cache(tmp_path / "unsigned", options={**s3, "skip_signature": True}) as cache:  # there is nothing to sign with
        assert cache.read("s3://bucket/signed") == b"x"
        with pytest.raises(NotServedError, match=r"s3://bucket/none: there is no such object"):
            cache.read("s3://bucket/none")

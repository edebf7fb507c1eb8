# SPDX-License-Identifier: Apache-2.0
"""Where remote files come from: one narrow seam, `Source.begin`, with a backend for each kind of store behind it.

A backend opens a file once and says with that same answer how long the file is and what checksum the store has for
it, so that a file costs one request and not three. It makes no retries of its own: those are counted and waited for
in one place (:mod:`paceline.data.cache.download`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

CHUNK_BYTES = 2 << 20
"""How much is asked for, hashed and written at a time."""

OBSTORE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")


@dataclass(frozen=True)
class Checksum:
    """A checksum that a store has for a file: the name of the algorithm and the digest in hexadecimal digits."""

    algorithm: str
    digest: str

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.digest}"


@dataclass(frozen=True)
class Remote:
    """A file that is open at its source: its size in bytes, its checksum (None: not known) and its bytes."""

    size: int | None
    checksum: Checksum | None
    chunks: Iterator[bytes]


class Source(Protocol):
    """One store."""

    def begin(self, url: str) -> AbstractContextManager[Remote]:
        """Open a file to be read once, from its start.

        Raises:
            NotServedError: there is no such file, or it may not be read.
            Unavailable: anything that another try might cure; also while the chunks are read.
        """


def scheme_of(url: str) -> str:
    """The scheme of a url in lower case; "" for a path."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)(::|://)", url)
    return found.group(1).lower() if found else ""


def local_path(url: str) -> Path | None:
    """The path that a path or a `file://` url names; None for anything remote."""
    scheme = scheme_of(url)
    if scheme in ("file", "local"):
        return Path(unquote(urlsplit(url).path))
    return None if scheme else Path(url)


def name_of(url: str) -> str:
    """Which source a url belongs to: `scheme://host-or-bucket`, without user names and passwords."""
    if local_path(url) is not None:
        return "file://"
    return f"{scheme_of(url)}://{_host(url)}"


def shown(url: str) -> str:
    """A url as it may stand in a message: without its query and without user names, which may hold secrets."""
    if not scheme_of(url):
        return url
    return f"{scheme_of(url)}://{_host(url)}{urlsplit(url).path}"


def _host(url: str) -> str:
    """What stands between `://` and the path; before an @ stands a user, except on Azure, where it is a container."""
    host = urlsplit(url).netloc
    return host if scheme_of(url) in ("abfs", "abfss") else host.rpartition("@")[2]


def md5_of_base64(text: str | None) -> Checksum | None:
    """The checksum in a `Content-MD5` header or in Google's `md5Hash`."""
    return _of_base64("md5", text, 16)


def sha256_of_base64(text: str | None) -> Checksum | None:
    """The checksum in `x-amz-checksum-sha256` or in a `Repr-Digest` header."""
    return _of_base64("sha256", text, 32)


def crc32c_of_base64(text: str | None) -> Checksum | None:
    """The checksum that Google has for files that were put together from parts."""
    return _of_base64("crc32c", text, 4)


def _of_base64(algorithm: str, text: str | None, length: int) -> Checksum | None:
    try:
        raw = base64.b64decode(text or "", validate=True)
    except (binascii.Error, ValueError):
        return None
    return Checksum(algorithm, raw.hex()) if len(raw) == length else None


def md5_of_etag(etag: str | None) -> Checksum | None:
    """The checksum in an S3 ETag; a file that was sent in parts has none (its ETag ends in the number of parts)."""
    found = re.fullmatch(r'"?([0-9a-fA-F]{32})"?', etag or "")
    return Checksum("md5", found.group(1).lower()) if found else None


def sha256_of_hex(text: Any) -> Checksum | None:
    """The checksum that whoever stored the file wrote beside it, as `sha256` in its metadata."""
    found = re.fullmatch(r"[0-9a-fA-F]{64}", text) if isinstance(text, str) else None
    return Checksum("sha256", found.group(0).lower()) if found else None


def hasher(algorithm: str) -> Any | None:
    """An object with `update` and `hexdigest`, or None where this machine cannot compute the algorithm."""
    if algorithm == "crc32c":
        if importlib.util.find_spec("google_crc32c") is None:
            return None
        import google_crc32c

        return _Crc32c(google_crc32c)
    return hashlib.new(algorithm, usedforsecurity=False)


class _Crc32c:
    """Google's checksum behind hashlib's names."""

    def __init__(self, module: Any) -> None:
        self._sum = module.Checksum()

    def update(self, data: bytes) -> None:
        self._sum.update(bytes(data))

    def hexdigest(self) -> str:
        return str(self._sum.digest().hex())


def digest_of(path: Path, algorithm: str) -> str | None:
    """The digest of a file in hexadecimal digits; None where the algorithm is not to be had."""
    made = hasher(algorithm)
    if made is None:
        return None
    with open(path, "rb", buffering=0) as file:
        for chunk in iter(_reader(file), b""):
            made.update(chunk)
    return str(made.hexdigest())


def _reader(file: Any) -> Callable[[], bytes]:
    return lambda: bytes(file.read(CHUNK_BYTES))

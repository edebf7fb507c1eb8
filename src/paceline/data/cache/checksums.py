# SPDX-License-Identifier: Apache-2.0
"""Checksums that object stores and web servers have for their files."""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_BYTES = 2 << 20


@dataclass(frozen=True)
class Checksum:
    """A checksum that a store has for a file: the name of the algorithm and the digest in hexadecimal digits."""

    algorithm: str
    digest: str

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.digest}"


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
        while chunk := file.read(READ_BYTES):
            made.update(chunk)
    return str(made.hexdigest())

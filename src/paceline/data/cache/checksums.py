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
DIGEST_BYTES = {"md5": 16, "sha256": 32, "crc32c": 4}


@dataclass(frozen=True)
class Checksum:
    """A checksum that a source has for a file: the name of the algorithm and the hexadecimal digest."""

    algorithm: str
    digest: str

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.digest}"


def from_base64(algorithm: str, text: str | None) -> Checksum | None:
    """The checksum in a header such as `Content-MD5` or `x-amz-checksum-sha256`, or in Google's metadata."""
    try:
        raw = base64.b64decode(text or "", validate=True)
    except (binascii.Error, ValueError):
        return None
    return Checksum(algorithm, raw.hex()) if len(raw) == DIGEST_BYTES[algorithm] else None


def md5_of_etag(etag: str | None) -> Checksum | None:
    """The checksum in an S3 ETag; a multipart upload has none (its ETag ends in the number of parts)."""
    found = re.fullmatch(r'"?([0-9a-fA-F]{32})"?', etag or "")
    return Checksum("md5", found.group(1).lower()) if found else None


def sha256_of_hex(text: Any) -> Checksum | None:
    """The checksum that the user stored as `sha256` in the file's metadata."""
    found = re.fullmatch(r"[0-9a-fA-F]{64}", text) if isinstance(text, str) else None
    return Checksum("sha256", found.group(0).lower()) if found else None


def hasher(algorithm: str) -> Any | None:
    """An object with `update` and `hexdigest`; None where this machine cannot compute the algorithm."""
    if algorithm != "crc32c":
        return hashlib.new(algorithm, usedforsecurity=False)
    if importlib.util.find_spec("google_crc32c") is None:
        return None
    import google_crc32c

    return _Crc32c(google_crc32c)


class _Crc32c:
    """Google's CRC32C with the interface of hashlib."""

    def __init__(self, module: Any) -> None:
        self._sum = module.Checksum()

    def update(self, data: bytes) -> None:
        self._sum.update(bytes(data))

    def hexdigest(self) -> str:
        return str(self._sum.digest().hex())


def digest_of(path: Path, algorithm: str) -> str | None:
    """The hexadecimal digest of a file; None where this machine cannot compute the algorithm."""
    running = hasher(algorithm)
    if running is None:
        return None
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(READ_BYTES):
            running.update(chunk)
    return str(running.hexdigest())

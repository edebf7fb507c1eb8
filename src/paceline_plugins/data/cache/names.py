# SPDX-License-Identifier: Apache-2.0
"""File names of the cache: a hash of the URL and a harmless file extension."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True)
class CacheEntry:
    """The JSON beside a file. `source` is the source's checksum as `algorithm:digest`, or one computed for want of it.

    At least one of `sha256` and `source` is set; the file on disk is checked against it.
    """

    url: str
    size: int
    sha256: str | None
    source: str | None


def key_of(url: str) -> str:
    """The first 32 hexadecimal digits of the SHA-256 of a URL."""
    return hashlib.sha256(url.encode()).hexdigest()[:32]


def file_name(url: str) -> str:
    """The name of a complete file."""
    return f"f-{key_of(url)}{extension(url)}"


def extension(url: str) -> str:
    """The extension of a URL's path (".tar", ".tar.gz"), if it is harmless in a file name; else ""."""
    found = re.search(r"[^/](\.tar)?(\.[A-Za-z0-9_]{1,12})\Z", urlsplit(url).path)
    return f"{found.group(1) or ''}{found.group(2)}" if found else ""


def read_entry(path: Path) -> CacheEntry | None:
    """The JSON beside a file; None where it is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
        return CacheEntry(str(found["url"]), int(found["size"]), found["sha256"], found["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

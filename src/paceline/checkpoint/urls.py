# SPDX-License-Identifier: Apache-2.0
"""URLs and local paths, and how they appear in messages: without secrets."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

OBSTORE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
USER = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://)[^/\s?#'\"]*@(?=[^/\s])")
QUERY = re.compile(r"(?<=[\w/%.~=:-])\?[^\s'\"<>)\]]*=[^'\"<>)\]\n]*")
NAMED = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|[a-z_-]*(?:signature|credential|password|secret|token|"
    r"(?:api|access|account|shared|private)[_-]?key)|sig)(['\"]?\s*[:=]\s*['\"]?)(?:(?:bearer|basic)\s+)?[^\s'\"&,;)\]}]+"
)


def scheme_of(url: str) -> str:
    """The scheme of a URL in lower case; "" for a path."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)(::|://)", url)
    return match.group(1).lower() if match else ""


def local_path(url: str | Path) -> Path | None:
    """The path that a path or a `file://` URL names; None for a remote URL."""
    if isinstance(url, Path):
        return url
    scheme = scheme_of(url)
    if scheme in ("file", "local"):
        return Path(unquote(urlsplit(url).path))
    return None if scheme else Path(url)


def source_of(url: str) -> str:
    """The source of a URL: `scheme://host-or-bucket`, without user name and password."""
    if local_path(url) is not None:
        return "file://"
    return f"{scheme_of(url)}://{_host(url)}"


def shown(url: str) -> str:
    """A URL for messages: without its query and user name, which may be secret."""
    if not scheme_of(url):
        return url
    return f"{scheme_of(url)}://{_host(url)}{urlsplit(url).path}"


def _host(url: str) -> str:
    """The part between `://` and the path, without the user; on Azure the part before an @ is a container."""
    host = urlsplit(url).netloc
    return host if scheme_of(url) in ("abfs", "abfss") else host.rpartition("@")[2]


def redacted(text: object) -> str:
    """A client library's error without user names, passwords, tokens and the queries of signed URLs."""
    return NAMED.sub(r"\1\2...", QUERY.sub("?...", USER.sub(r"\1", str(text))))

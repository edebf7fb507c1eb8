# SPDX-License-Identifier: Apache-2.0
"""The backend for a URL: obstore, HTTP, fsspec or a local file."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from paceline.data.cache.objects import ObstoreSource  # now, because from now on it notices forks
from paceline.data.cache.source import OBSTORE_SCHEMES, Source, scheme_of


def source_for(url: str, options: Mapping[str, Any], timeout_s: float) -> Source:
    """The backend for a url.

    Args:
        url: `s3://bucket/key`, `https://host/path`, or whatever fsspec knows.
        options: `backend` ("obstore", "fsspec" or "http") makes the choice by hand; `checksums=False` ignores what the
            store says of checksums; all others go to the backend: obstore's names (`endpoint`, `region`,
            `access_key_id`, ...) or those of fsspec's file system; `headers` for plain HTTP.
        timeout_s: of one request.
    """
    rest = {key: value for key, value in options.items() if key not in ("backend", "checksums")}
    scheme = scheme_of(url)
    backend = options.get("backend") or _choice(scheme)
    if backend == "obstore":
        return ObstoreSource(url, rest, timeout_s)
    if backend == "http":
        from paceline.data.cache.web import HttpSource

        return HttpSource(rest.get("headers", {}), timeout_s)
    if backend == "fsspec":
        from paceline.data.cache.filesystems import FsspecSource

        return FsspecSource(url, rest)
    raise ValueError(f"there is no backend {backend!r}; options['backend'] is 'obstore', 'fsspec' or 'http'")


def _choice(scheme: str) -> str:
    if scheme in ("http", "https"):
        return "http"
    if scheme in OBSTORE_SCHEMES and importlib.util.find_spec("obstore") is not None:
        return "obstore"
    return "fsspec"

# SPDX-License-Identifier: Apache-2.0
"""The backend for a URL: obstore, HTTP or fsspec."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from paceline.checkpoint.urls import OBSTORE_SCHEMES, scheme_of
from paceline_plugins.data.cache.backend import Backend
from paceline_plugins.data.cache.obstore_backend import ObstoreBackend  # at import, so that it notices every later fork


def backend_for(url: str, options: Mapping[str, Any], timeout_s: float) -> Backend:
    """The backend for a URL.

    Args:
        url: `s3://bucket/key`, `https://host/path`, or any URL of fsspec.
        options: `backend` ("obstore", "fsspec" or "http") overrides the choice; `checksums=False` ignores the
            source's checksums; the other options go to the backend: obstore's names (`endpoint`, `region`,
            `access_key_id`, ...) or those of fsspec's file system; `headers` for plain HTTP.
        timeout_s: of one request.
    """
    rest = {key: value for key, value in options.items() if key not in ("backend", "checksums")}
    backend = options.get("backend") or _default_backend(scheme_of(url))
    if backend == "obstore":
        return ObstoreBackend(url, rest, timeout_s)
    if backend == "http":
        from paceline_plugins.data.cache.http_backend import HttpBackend

        return HttpBackend(rest.get("headers", {}), timeout_s)
    if backend == "fsspec":
        from paceline_plugins.data.cache.fsspec_backend import FsspecBackend

        return FsspecBackend(url, rest)
    raise ValueError(f"there is no backend {backend!r}; options['backend'] is 'obstore', 'fsspec' or 'http'")


def _default_backend(scheme: str) -> str:
    if scheme in ("http", "https"):
        return "http"
    if scheme in OBSTORE_SCHEMES and importlib.util.find_spec("obstore") is not None:
        return "obstore"
    return "fsspec"

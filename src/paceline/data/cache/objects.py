# SPDX-License-Identifier: Apache-2.0
"""Object stores (S3 and what speaks like it, Google, Azure) through obstore, which is faster than fsspec's clients."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from paceline.data.cache.errors import Unavailable
from paceline.data.cache.source import CHUNK_BYTES, Checksum, Remote, md5_of_etag, scheme_of, sha256_of_hex, shown
from paceline.errors import NotServedError

_first_process: int | None = None


class ObstoreSource:
    """One bucket.

    Args:
        url: any url of the bucket.
        options: obstore's settings of the store (`endpoint`, `region`, `access_key_id`, `secret_access_key`,
            `skip_signature`, `client_options`, ...).
        timeout_s: of one request.
    """

    def __init__(self, url: str, options: Mapping[str, Any], timeout_s: float) -> None:
        obstore = _obstore()
        parts = urlsplit(url)
        self._obstore, self._s3 = obstore, scheme_of(url) in ("s3", "s3a")
        client = {"timeout": timedelta(seconds=timeout_s), "connect_timeout": timedelta(seconds=timeout_s)}
        if str(options.get("endpoint", "")).startswith("http://"):
            client["allow_http"] = True  # type: ignore[assignment]
        settings = {key: value for key, value in options.items() if key != "client_options"}
        self._store = obstore.store.from_url(
            f"{parts.scheme}://{parts.netloc}",
            client_options={**client, **options.get("client_options", {})},
            retry_config={"max_retries": 0},  # retries are counted and waited for by the caller
            **settings,
        )

    @contextmanager
    def begin(self, url: str) -> Iterator[Remote]:
        """See :class:`paceline.data.cache.source.Source`."""
        _forbid_fork()
        key = url.partition("://")[2].partition("/")[2]  # as it is: %, ? and # are letters like others in a key
        try:
            answer = self._obstore.get(self._store, key)
        except Exception as error:
            raise self._told(url, error) from error
        yield Remote(int(answer.meta["size"]), self._checksum(answer), self._chunks(url, answer))

    def _checksum(self, answer: Any) -> Checksum | None:
        sha256 = sha256_of_hex(answer.attributes.get("sha256"))
        return sha256 or (md5_of_etag(answer.meta["e_tag"]) if self._s3 else None)

    def _chunks(self, url: str, answer: Any) -> Iterator[bytes]:
        try:
            yield from answer.stream(min_chunk_size=CHUNK_BYTES)
        except Exception as error:
            raise self._told(url, error) from error

    def _told(self, url: str, error: Exception) -> Exception:
        known = self._obstore.exceptions
        text = str(error).split("\n")[0][:300]
        if isinstance(error, (FileNotFoundError, known.NotFoundError)):
            return NotServedError(f"{shown(url)}: there is no such object ({text}); check the url")
        if isinstance(error, (PermissionError, known.PermissionDeniedError, known.UnauthenticatedError)):
            return NotServedError(
                f"{shown(url)}: the store refuses it ({text}); check the credentials, in the environment or in options"
            )
        if isinstance(error, (known.InvalidPathError, known.NotSupportedError, known.UnknownConfigurationKeyError)):
            return NotServedError(f"{shown(url)}: {text}")
        return Unavailable(text)


def _obstore() -> Any:
    try:
        import obstore
        import obstore.store
    except ImportError:
        raise NotServedError("this store needs obstore; pip install 'paceline[remote]'") from None
    _forbid_fork()
    return obstore


def _forbid_fork() -> None:
    """obstore's threads do not survive a fork: a child of a process that used it would wait for ever."""
    global _first_process
    _first_process = _first_process or os.getpid()
    if _first_process != os.getpid():
        raise NotServedError(
            f"process {os.getpid()} was forked from process {_first_process}, which had read from an object store "
            "already, and the store's client does not survive that; start the loader's processes with "
            "multiprocessing_context='spawn', or fetch the files in the parent, or pass options={'backend': 'fsspec'}"
        )

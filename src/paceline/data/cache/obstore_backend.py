# SPDX-License-Identifier: Apache-2.0
"""Object stores (S3 and its protocol, Google, Azure) through obstore, which is faster than fsspec's clients.

obstore's threads do not survive a fork: a forked child that used it would hang. So a child of a process that had
loaded obstore gets an error that says what to do.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from paceline.data.cache.backend import CHUNK_BYTES, RemoteFile, Unavailable
from paceline.data.cache.checksums import Checksum, best, md5_of_etag, of_metadata
from paceline.data.cache.urls import redacted, scheme_of, shown
from paceline.errors import NotServedError

_obstore_lost_in_fork = False


def _after_fork() -> None:
    global _obstore_lost_in_fork
    _obstore_lost_in_fork = _obstore_lost_in_fork or "obstore" in sys.modules


os.register_at_fork(after_in_child=_after_fork)


class ObstoreBackend:
    """The bucket to which a URL belongs; `options` are obstore's settings of the store.

    Raises:
        NotServedError: obstore is missing, rejects the options, or did not survive a fork.
    """

    def __init__(self, url: str, options: Mapping[str, Any], timeout_s: float) -> None:
        if importlib.util.find_spec("obstore") is None:
            raise NotServedError("this store needs obstore; pip install 'paceline[remote]'")
        _check_fork(url)
        import obstore
        import obstore.store

        self._obstore: Any = obstore
        self._s3 = scheme_of(url) in ("s3", "s3a")
        parts = urlsplit(url)
        client: dict[str, Any] = {name: timedelta(seconds=timeout_s) for name in ("timeout", "connect_timeout")}
        if str(options.get("endpoint", "")).startswith("http://"):
            client["allow_http"] = True
        settings = {key: value for key, value in options.items() if key != "client_options"}
        try:
            self._store = self._obstore.store.from_url(
                f"{parts.scheme}://{parts.netloc}",
                client_options={**client, **options.get("client_options", {})},
                retry_config={"max_retries": 0},  # the downloader retries
                **settings,
            )
        except Exception as error:
            raise NotServedError(f"{shown(url)}: the options of this store: {_first_line(error)}") from None

    @contextmanager
    def begin(self, url: str) -> Iterator[RemoteFile]:
        """See :class:`paceline.data.cache.backend.Backend`."""
        _check_fork(url)
        key = url.partition("://")[2].partition("/")[2]  # %, ? and # are ordinary letters in a key
        try:
            answer = self._obstore.get(self._store, key)
        except Exception as error:
            raise self._explained(url, error) from None
        yield RemoteFile(int(answer.meta["size"]), self._checksum(answer), self._chunks(url, answer))

    def _checksum(self, answer: Any) -> Checksum | None:
        etag = md5_of_etag(answer.meta["e_tag"]) if self._s3 else None
        return best([etag, *of_metadata(answer.attributes.get)])

    def _chunks(self, url: str, answer: Any) -> Iterator[bytes]:
        try:
            yield from answer.stream(min_chunk_size=CHUNK_BYTES)
        except Exception as error:
            raise self._explained(url, error) from None

    def _explained(self, url: str, error: Exception) -> Exception:
        known, said = self._obstore.exceptions, _first_line(error)
        if isinstance(error, (FileNotFoundError, known.NotFoundError)):
            return NotServedError(f"{shown(url)}: there is no such object ({said}); check the url")
        if isinstance(error, (PermissionError, known.PermissionDeniedError, known.UnauthenticatedError)):
            return NotServedError(
                f"{shown(url)}: the store refuses it ({said}); check the credentials, in the environment or in options"
            )
        if isinstance(error, (known.InvalidPathError, known.NotSupportedError, known.UnknownConfigurationKeyError)):
            return NotServedError(f"{shown(url)}: {said}")
        return Unavailable(said)


def _check_fork(url: str) -> None:
    if _obstore_lost_in_fork:
        raise NotServedError(
            f"{shown(url)} cannot be fetched in process {os.getpid()}, which was forked from one that had loaded "
            "obstore: obstore's threads do not survive a fork. Start the loader's processes with "
            "DataLoader(..., multiprocessing_context='spawn') and keep the program's start under "
            "`if __name__ == '__main__':`; or fetch in the parent (num_workers=0, threads fetch ahead); or pass "
            "Cache(..., options={'backend': 'fsspec'})"
        )


def _first_line(error: Exception) -> str:
    return redacted(str(error).split("\n")[0][:300])

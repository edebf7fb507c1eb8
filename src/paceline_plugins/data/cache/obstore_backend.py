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
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from paceline.checkpoint.urls import redacted, scheme_of, shown
from paceline.errors import NotServedError
from paceline_plugins.data.cache.backend import CHUNK_BYTES, RemoteFile, Unavailable
from paceline_plugins.data.cache.checksums import Checksum, best, md5_of_etag, of_metadata
from paceline_plugins.data.cache.http_backend import HttpBackend
from paceline_plugins.data.cache.plain_body import PIECE_BYTES

SIGNED_FOR = timedelta(minutes=15)
"""How far the clocks of this machine and of the store may differ."""

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
        self._http: HttpBackend | None = None
        self._is_large = True  # the last file, and so probably the next
        if str(options.get("endpoint", "")).startswith("http://"):
            client["allow_http"] = True
            if self._s3 and "client_options" not in options:  # a proxy, for example
                self._http = HttpBackend({}, timeout_s, s3=True)
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
        """See :class:`paceline_plugins.data.cache.backend.Backend`."""
        _check_fork(url)
        key = url.partition("://")[2].partition("/")[2]  # %, ? and # are ordinary letters in a key
        with ExitStack() as opened:
            remote = self._begin_without_tls(key, opened) or self._begin_obstore(url, key)
            self._is_large = remote.size is not None and remote.size >= PIECE_BYTES
            yield remote

    def _begin_obstore(self, url: str, key: str) -> RemoteFile:
        try:
            answer = self._obstore.get(self._store, key)
        except Exception as error:
            raise self._explained(url, error) from None
        return RemoteFile(int(answer.meta["size"]), self._checksum(answer), self._chunks(url, answer))

    def _begin_without_tls(self, key: str, opened: ExitStack) -> RemoteFile | None:
        """Open a signed URL with our own client, which takes less of the processor where there is no TLS.

        None where the store has TLS, where files are small (obstore keeps connections open), or where the store
        refuses: then obstore asks again, and explains why.
        """
        if self._http is None or not self._is_large:
            return None
        try:
            signed = self._obstore.sign(self._store, "GET", key, SIGNED_FOR)
            remote = opened.enter_context(self._http.begin(signed))
        except (NotServedError, self._obstore.exceptions.BaseError):
            return None
        return remote if remote.size is not None else None

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

# SPDX-License-Identifier: Apache-2.0
"""Object stores (S3 and what speaks like it, Google, Azure) through obstore, which is faster than fsspec's clients."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.data.cache.bucket import Bucket, Failure
from paceline.data.cache.errors import Unavailable
from paceline.data.cache.fetch_subprocess import Relays, obstore_is_lost
from paceline.data.cache.redact import redacted
from paceline.data.cache.source import Checksum, Remote, md5_of_etag, scheme_of, sha256_of_hex, shown
from paceline.errors import NotServedError


class ObstoreSource:
    """One bucket. In a process that was forked after its parent had used obstore, another process reads it.

    Args:
        url: any url of the bucket.
        options: obstore's settings of the store (`endpoint`, `region`, `access_key_id`, `secret_access_key`,
            `skip_signature`, `client_options`, ...).
        timeout_s: of one request.

    Raises:
        NotServedError: there is no obstore, or it does not take the options.
    """

    def __init__(self, url: str, options: Mapping[str, Any], timeout_s: float) -> None:
        if importlib.util.find_spec("obstore") is None:
            raise NotServedError("this store needs obstore; pip install 'paceline[remote]'")
        self._options, self._timeout_s, self._s3 = dict(options), timeout_s, scheme_of(url) in ("s3", "s3a")
        self._bucket: Bucket | None = None
        self._relays: Relays | None = None
        if not obstore_is_lost():
            try:
                self._bucket = Bucket(url, options, timeout_s)
            except Failure as failure:
                raise _told(url, failure) from None

    @contextmanager
    def begin(self, url: str) -> Iterator[Remote]:
        """See :class:`paceline.data.cache.source.Source`."""
        if obstore_is_lost() or self._bucket is None:
            with self._begin_elsewhere(url) as remote:
                yield remote
            return
        try:
            answer = self._bucket.get(url)
        except Failure as failure:
            raise _told(url, failure) from None
        yield self._remote(url, answer.size, answer.etag, answer.sha256, answer.chunks())

    @contextmanager
    def _begin_elsewhere(self, url: str) -> Iterator[Remote]:
        if self._relays is None or self._relays.process != os.getpid():
            self._relays = Relays(self._options, self._timeout_s)
        try:
            with self._relays.get(url) as (head, chunks):
                yield self._remote(url, int(head["size"]), head["etag"], head["sha256"], chunks)
        except Failure as failure:
            raise _told(url, failure) from None

    def _remote(self, url: str, size: int, etag: str | None, sha256: str | None, chunks: Iterator[bytes]) -> Remote:
        checksum: Checksum | None = sha256_of_hex(sha256) or (md5_of_etag(etag) if self._s3 else None)
        return Remote(size, checksum, _chunks(url, chunks))

    def close(self) -> None:
        """End the processes that read for this one."""
        if self._relays is not None and self._relays.process == os.getpid():
            self._relays.close()


def _chunks(url: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from chunks
    except Failure as failure:
        raise _told(url, failure) from None


def _told(url: str, failure: Failure) -> Exception:
    said = redacted(failure)
    if failure.kind == "missing":
        return NotServedError(f"{shown(url)}: there is no such object ({said}); check the url")
    if failure.kind == "refused":
        return NotServedError(
            f"{shown(url)}: the store refuses it ({said}); check the credentials, in the environment or in options"
        )
    if failure.kind == "wrong":
        return NotServedError(f"{shown(url)}: {said}")
    return Unavailable(said)

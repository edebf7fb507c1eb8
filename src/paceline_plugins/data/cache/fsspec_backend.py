# SPDX-License-Identifier: Apache-2.0
"""Every store of fsspec: HDFS, OSS, SFTP, memory, archives, and object stores where obstore is not installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.checkpoint.urls import redacted, scheme_of, shown
from paceline.errors import NotServedError
from paceline_plugins.data.cache.backend import BLOCK_BYTES, CHUNK_BYTES, RemoteFile, Unavailable
from paceline_plugins.data.cache.checksums import Checksum, best, from_base64, from_hex, md5_of_etag, of_metadata

REFUSED = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, ValueError)


class FsspecBackend:
    """The file system of fsspec to which a URL belongs."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        import fsspec

        try:
            self._files, _ = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            raise NotServedError(
                f"{shown(url)}: fsspec needs another library for {scheme_of(url)!r} ({error}); "
                "for s3, gs and az, pip install 'paceline[remote]'"
            ) from None
        except ValueError as error:
            raise NotServedError(f"{shown(url)}: {redacted(error)}") from None
        self._s3 = scheme_of(url) in ("s3", "s3a", "oss")

    @contextmanager
    def begin(self, url: str) -> Iterator[RemoteFile]:
        """See :class:`paceline_plugins.data.cache.backend.Backend`."""
        try:
            path = self._files._strip_protocol(url)
            info = self._files.info(path)
            if info.get("type") == "directory":
                raise IsADirectoryError("it is a folder")
            file = self._files.open(path, "rb", block_size=BLOCK_BYTES, cache_type="readahead")
        except Exception as error:
            raise _explained(url, error) from None
        with file:
            size = info.get("size")
            yield RemoteFile(None if size is None else int(size), self._checksum(info), _chunks(url, file))

    def _checksum(self, info: Mapping[str, Any]) -> Checksum | None:
        metadata = info.get("metadata") or info.get("Metadata") or {}
        return best(
            [
                from_base64("crc32c", info.get("crc32c")),
                md5_of_etag(info.get("ETag")) if self._s3 else None,
                from_base64("md5", info.get("md5Hash")),
                *(of_metadata(metadata.get) if isinstance(metadata, Mapping) else ()),
                from_hex("sha256", info.get("sha256")),
            ]
        )


def _chunks(url: str, file: Any) -> Iterator[bytes]:
    try:
        while chunk := file.read(CHUNK_BYTES):
            yield bytes(chunk)
    except Exception as error:
        raise _explained(url, error) from None


def _explained(url: str, error: Exception) -> Exception:
    """Each store's client has errors of its own: retry all but a clear refusal."""
    if isinstance(error, FileNotFoundError):
        return NotServedError(f"{shown(url)}: there is no such file; check the url")
    if isinstance(error, REFUSED) and not isinstance(error, UnicodeError):
        return NotServedError(
            f"{shown(url)}: {type(error).__name__}: {redacted(error)}; check the url and the credentials"
        )
    return Unavailable(f"{type(error).__name__}: {redacted(error)[:300]}")

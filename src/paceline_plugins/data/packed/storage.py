# SPDX-License-Identifier: Apache-2.0
"""Storage: a directory of this machine, or a URL of fsspec."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from paceline.checkpoint.urls import redacted, shown
from paceline.errors import DataError


def is_url(text: str) -> bool:
    """Whether it is a remote URL; `file://` is local."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None and not text.lower().startswith("file://")


def local_path(text: str) -> Path:
    """The path of a path or a `file://` URL."""
    return Path(unquote(urlsplit(text).path)) if text.lower().startswith("file://") else Path(text)


def join(root: str, name: str) -> str:
    """The path or URL of a file in a directory."""
    return f"{root.rstrip('/')}/{name}" if is_url(root) else str(local_path(root) / name)


def file_system(url: str) -> tuple[Any, str]:
    """(fsspec's file system, the path within it); DataError if there is none for this protocol."""
    import fsspec

    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(
            f"cannot open {shown(url)}: {redacted(error)}; install what fsspec needs for this protocol"
        ) from None
    except Exception as error:  # each store's client has errors of its own
        raise DataError(f"cannot open {shown(url)}: {type(error).__name__}: {redacted(error)}") from None
    return found


def read_up_to(file: BinaryIO, count: int) -> bytes:
    """At most `count` bytes, in pieces, so that a large `count` allocates no memory."""
    pieces = []
    while count > 0 and (piece := file.read(min(count, 1 << 20))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


@contextlib.contextmanager
def faults_of(url: str) -> Iterator[None]:
    """Turn errors within the context into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{shown(url)} does not exist; copy it again, or pack again") from error
    except OSError as error:
        raise DataError(f"cannot read {shown(url)}: {error.strerror or redacted(error)}") from error
    except Exception as error:
        if not is_url(url):
            raise
        raise DataError(f"cannot read {shown(url)}: {type(error).__name__}: {redacted(error)}") from None


class Storage:
    """The files of a directory or a URL."""

    def __init__(self, root: str) -> None:
        self.root, self.remote = root, is_url(root)
        self._fs: Any = None
        self._inside = ""
        if self.remote:
            self._fs, self._inside = file_system(root)

    def where(self, name: str) -> str:
        """The path or URL of a file; `shown` removes its secrets for messages."""
        return join(self.root, name)

    def size(self, name: str) -> int:
        """Bytes of a file."""
        with faults_of(self.where(name)):
            if self._fs is None:
                return Path(self.where(name)).stat().st_size
            return int(self._fs.size(self._path(name)))

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Read a file front to back."""
        with faults_of(self.where(name)):
            if self._fs is None:
                with open(self.where(name), "rb") as local:
                    yield local
            else:
                with self._fs.open(self._path(name), "rb", block_size=1 << 22) as file:
                    yield file

    def read(self, name: str, largest: int) -> bytes:
        """A small file; more than `largest` bytes are refused."""
        with self.open(name) as file:
            raw = read_up_to(file, largest + 1)
        if len(raw) > largest:
            raise DataError(
                f"{shown(self.where(name))} has more than {largest} bytes; it is damaged or no file of this kind"
            )
        return raw

    def read_part(self, name: str, begin: int, end: int) -> bytes:
        """Bytes begin .. end (excl.) of a file, in one request; fewer at its end."""
        with faults_of(self.where(name)):
            if self._fs is not None:
                return bytes(self._fs.cat_file(self._path(name), start=begin, end=end))
            with open(self.where(name), "rb", buffering=0) as file:
                file.seek(begin)
                return file.read(end - begin) or b""

    def _path(self, name: str) -> str:
        return f"{self._inside.rstrip('/')}/{name}"

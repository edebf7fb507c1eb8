# SPDX-License-Identifier: Apache-2.0
"""What every source gives, and how a compressed stream is opened."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from ..faults import DataError

Members = dict[str, bytes]
"""One sample: extension -> bytes."""
Task = Callable[[], Members]
"""Reads one sample; several run at once in threads."""

LARGEST_SAMPLE = 1 << 30  # bytes
ORIGIN = "source.json"
"""Extension of the member that says what a sample was called where it came from."""


@dataclass
class Progress:
    """How far a source is; changed while it is read."""

    fraction: float | None = None  # of the whole source; None where that cannot be told
    notes: list[str] = field(default_factory=list)  # what was passed over


class Source(Protocol):
    """Where samples come from.

    Attributes:
        progress: how far it is.
    """

    progress: Progress

    def tasks(self, seed: int | None) -> Iterator[Task]:
        """One task for each sample, in the source's order, or in the order that the seed gives.

        Raises:
            DataError: the source is damaged, or has no other order than its own.
        """


def no_shuffle(name: str, what: str) -> DataError:
    """A stream can only be read front to back."""
    return DataError(
        f"{name}: {what} is read front to back and cannot be shuffled with a seed; pack it without --seed, then pack "
        "what came out with --seed"
    )


def origin(key: str, **more: Any) -> bytes:
    """The member that keeps a sample's name."""
    return json.dumps({"key": key, **more}).encode()


class Ready:
    """A task whose sample is read already, so that no thread is needed for it."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def __call__(self) -> Members:
        return self._members


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong while `path` is read or unpacked is one line that names it."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; check the path") from error
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: the compressed data are damaged or cut off ({error}); copy it again") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


class Stream:
    """A file read front to back, unpacked on the way where its name ends in .gz, .bz2, .xz or .zst.

    Args:
        path: the file.
        progress: told how far it is.
        share: (begin, end) of this file in the whole source, as fractions.
    """

    def __init__(self, path: Path, progress: Progress, share: tuple[float, float] = (0.0, 1.0)) -> None:
        self.path, self._progress, self._share = path, progress, share

    def __enter__(self) -> BinaryIO:
        with reading(self.path):
            self._raw = self.path.open("rb")
            self._size = max(1, self.path.stat().st_size)
            self._file = _unpacked(self._raw, self.path)
        return self._file

    def __exit__(self, *error: object) -> None:
        self._raw.close()

    def told(self) -> None:
        """Bring the progress up to date."""
        begin, end = self._share
        self._progress.fraction = begin + (end - begin) * min(1.0, self._raw.tell() / self._size)


def _unpacked(raw: BinaryIO, path: Path) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix in (".gz", ".tgz"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=raw))
    if suffix in (".xz", ".txz"):
        return cast("BinaryIO", lzma.LZMAFile(raw))
    if suffix in (".bz2", ".tbz2"):
        return cast("BinaryIO", bz2.BZ2File(raw))
    if suffix in (".zst", ".tzst"):
        return cast("BinaryIO", io.BufferedReader(_zst(raw, path), 1 << 20))
    return raw


def _zst(raw: BinaryIO, path: Path) -> io.RawIOBase:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(f"{path}: .zst needs zstandard, which is not installed: pip install zstandard") from error
    return _Zst(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True), zstandard.ZstdError)


class _Zst(io.RawIOBase):
    """zstandard's reader, whose errors are those of the other formats."""

    def __init__(self, reader: Any, error: type[Exception]) -> None:
        self._reader, self._error = reader, error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return int(self._reader.readinto(buffer))
        except self._error as error:
            raise EOFError(str(error)) from error

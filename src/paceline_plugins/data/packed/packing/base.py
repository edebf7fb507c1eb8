# SPDX-License-Identifier: Apache-2.0
"""The interface of sources, and reading of compressed files."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from paceline.errors import DataError

Members = dict[str, bytes]
"""One sample: extension -> bytes."""
Task = Callable[[], Members]
"""Reads one sample; several run at once in threads."""

LARGEST_SAMPLE = 1 << 30  # bytes
ZST_PIECE = 1 << 12  # bytes; they decompress to at most 128 MiB
ORIGIN = "source.json"
"""Extension of the member that keeps a sample's name in its source."""


@dataclass
class SourceProgress:
    """How far a source has been read; updated while it is read."""

    fraction: float | None = None  # of the whole source; None where that is unknown
    notes: list[str] = field(default_factory=list)  # of samples that were skipped


class SampleSource(Protocol):
    """A source of samples."""

    progress: SourceProgress

    def tasks(self, seed: int | None) -> Iterator[Task]:
        """One task for each sample, in the source's order or in a seeded one.

        Raises:
            DataError: the source is damaged, or cannot be shuffled.
        """


class FileSource:
    """Files that are read one after another; a sample of more than `largest` bytes is refused."""

    def __init__(self, paths: Sequence[Path], largest: int) -> None:
        self._paths, self._largest = paths, largest
        self.progress = SourceProgress()


def no_shuffle(name: str, what: str) -> DataError:
    """The error of a source that can only be read front to back."""
    return DataError(
        f"{name}: {what} is read front to back and cannot be shuffled with a seed; pack it without --seed, then pack "
        "what came out with --seed"
    )


def origin(key: str, **more: Any) -> bytes:
    """The member that keeps a sample's name."""
    return json.dumps({"key": key, **more}).encode()


def too_large(what: str) -> DataError:
    """The error of a sample above the limit."""
    return DataError(f"{what}; open_source(path, largest=BYTES) allows larger ones")


@dataclass(frozen=True)
class Ready:
    """A task whose sample has been read, so that it needs no thread."""

    members: Members

    def __call__(self) -> Members:
        return self.members


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of reading or decompressing `path` within the context into a DataError that names it."""
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
    """File `number` of a source, read front to back and decompressed if it ends in .gz, .bz2, .xz or .zst."""

    def __init__(self, paths: Sequence[Path], number: int, progress: SourceProgress) -> None:
        self.path, self._number, self._count, self._progress = paths[number], number, len(paths), progress

    def __enter__(self) -> BinaryIO:
        with reading(self.path):
            self._raw = self.path.open("rb")
            self._size = max(1, self.path.stat().st_size)
            file = _decompressed(self._raw, self.path)
        return file

    def __exit__(self, *error: object) -> None:
        self._raw.close()

    def update(self) -> None:
        """Update the source's progress."""
        self._progress.fraction = (self._number + min(1.0, self._raw.tell() / self._size)) / self._count


def _decompressed(raw: BinaryIO, path: Path) -> BinaryIO:
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
        raise DataError(
            f"{path}: .zst needs zstandard, which is not installed: pip install 'paceline[zstd]'"
        ) from error
    return _Zst(raw, zstandard.ZstdDecompressor(), zstandard.ZstdError)


class _Zst(io.RawIOBase):
    """Frames one after another; unlike zstandard's own reader it raises where the last frame is cut off."""

    def __init__(self, raw: BinaryIO, library: Any, error: type[Exception]) -> None:
        self._raw, self._library, self._error = raw, library, error
        self._frame: Any = None
        self._compressed = self._decompressed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decompressed and self._more():
            pass
        count = min(len(buffer), len(self._decompressed))
        buffer[:count], self._decompressed = self._decompressed[:count], self._decompressed[count:]
        return count

    def _more(self) -> bool:
        """Decompress a piece; False at the end."""
        self._compressed = self._compressed or self._raw.read(ZST_PIECE)
        if not self._compressed:
            if self._frame is not None:
                raise EOFError("the last frame has no end")
            return False
        self._frame = self._frame or self._library.decompressobj()
        try:
            self._decompressed = self._frame.decompress(self._compressed)
        except self._error as error:
            raise EOFError(str(error)) from error
        self._compressed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return True

# SPDX-License-Identifier: Apache-2.0
"""The interface of sources, and streams of compressed files."""

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

from paceline.errors import DataError

Members = dict[str, bytes]
"""One sample: extension -> bytes."""
Task = Callable[[], Members]
"""Reads one sample; several run at once in threads."""

LARGEST_SAMPLE = 1 << 30  # bytes
ZST_PIECE = 1 << 12  # bytes; they unpack to 128 MiB at most
ORIGIN = "source.json"
"""Extension of the member that says what a sample was called where it came from."""


@dataclass
class SourceProgress:
    """How far a source is; changed while it is read."""

    fraction: float | None = None  # of the whole source; None where that cannot be told
    notes: list[str] = field(default_factory=list)  # what was passed over


class SampleSource(Protocol):
    """Where samples come from.

    Attributes:
        progress: how far it is.
    """

    progress: SourceProgress

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
    """Context that turns any error of reading or unpacking `path` into a one-line error that names it."""
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

    def __init__(self, path: Path, progress: SourceProgress, share: tuple[float, float] = (0.0, 1.0)) -> None:
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
        raise DataError(
            f"{path}: .zst needs zstandard, which is not installed: pip install 'paceline[zstd]'"
        ) from error
    return _Zst(raw, zstandard.ZstdDecompressor(), zstandard.ZstdError)


class _Zst(io.RawIOBase):
    """Frames one after another; unlike zstandard's own reader it says so where the last one is cut off.

    Args:
        raw: compressed.
        library: makes an object that unpacks one frame.
        error: what that raises.
    """

    def __init__(self, raw: BinaryIO, library: Any, error: type[Exception]) -> None:
        self._raw, self._library, self._error = raw, library, error
        self._frame: Any = None
        self._packed = self._unpacked = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked and self._more():
            pass
        count = min(len(buffer), len(self._unpacked))
        buffer[:count], self._unpacked = self._unpacked[:count], self._unpacked[count:]
        return count

    def _more(self) -> bool:
        """Unpack a piece; False at the end."""
        self._packed = self._packed or self._raw.read(ZST_PIECE)
        if not self._packed:
            if self._frame is not None:
                raise EOFError("the last frame has no end")
            return False
        self._frame = self._frame or self._library.decompressobj()
        try:
            self._unpacked = self._frame.decompress(self._packed)
        except self._error as error:
            raise EOFError(str(error)) from error
        self._packed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return True

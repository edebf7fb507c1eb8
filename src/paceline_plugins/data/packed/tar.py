# SPDX-License-Identifier: Apache-2.0
"""Tar archives as a stream of samples, without extraction.

Source: POSIX.1-1988 (ustar), POSIX.1-2001 (pax) and GNU's long names. A header is a block of 512 bytes, data are padded
to whole blocks, two blocks of zeros are the end. Hostile archives are harmless: a name is never used as a path, and a
size is checked against a limit before anything is read.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from paceline.errors import DataError

BLOCK = 512
END = bytes(2 * BLOCK)
LONGEST_NAME = 1 << 16  # bytes of an extended header
_ZEROS = bytes(BLOCK)
_EMPTY = tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT)  # the header of a file without name and data
_OWNER, _TIME, _REST = _EMPTY[100:124], _EMPTY[135:148], _EMPTY[156:]
_BASE = sum(_EMPTY) - sum(_EMPTY[148:156]) + 8 * ord(" ")
_REGULAR = (b"0", b"\0", b"7")
_WHAT = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}


class Readable(Protocol):
    """A file that is read from front to back."""

    def read(self, count: int, /) -> bytes:
        """At most `count` bytes; empty at the end."""


class TarHeader(NamedTuple):
    """One header block."""

    name: str
    size: int  # bytes of data
    kind: bytes


class TarMember(NamedTuple):
    """A regular file of an archive."""

    name: str
    data: bytes
    offset: int  # of its first header, in the unpacked archive


def make_header(name: str, size: int) -> bytes:
    """A ustar header; owner, time and mode are constants, so that equal samples make equal archives."""
    raw, digits = name.encode("utf-8", "replace"), b"%011o" % size
    if not name.isascii() or not 0 < len(raw) <= 100 or not 0 <= size < 8**11:
        raise DataError(f"a member {name!r} of {size} bytes does not fit a tar archive; shorten or rename it")
    stated = _BASE + sum(raw) + sum(digits) - 11 * ord("0")
    return b"".join((raw.ljust(100, b"\0"), _OWNER, digits, _TIME, b"%06o\0 " % stated, _REST))


def padding(size: int) -> int:
    """Zeros after `size` bytes of data."""
    return -size % BLOCK


def parse_header(block: bytes, where: str) -> TarHeader | None:
    """A header; None for a block of zeros; DataError if the block is cut short or its checksum is wrong."""
    if len(block) < BLOCK:
        raise DataError(f"{where}: cut off within a header, {len(block)} of {BLOCK} bytes are left; copy it again")
    if block == _ZEROS:
        return None
    blanked = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    try:
        stated, size = _number(block[148:156]), _number(block[124:136])
    except ValueError:
        stated, size = -1, 0
    if stated != blanked or size < 0:
        raise DataError(f"{where}: no tar header here (its sum is wrong); the archive is damaged or no tar at all")
    name = _text(block[:100])
    if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500])):
        name = f"{prefix}/{name}"
    return TarHeader(name, size, block[156:157])


def _number(field: bytes) -> int:
    """Octal text, or big endian with the first bit set."""
    if field[0] & 0x80:
        return -1 if field[0] == 0xFF else int.from_bytes(field[1:], "big")
    return int(field.split(b"\0")[0].strip() or b"0", 8)


def _text(field: bytes) -> str:
    return field.split(b"\0")[0].decode("utf-8", "surrogateescape")


class TarStream:
    """The regular files of a decompressed archive, front to back; memory holds one of them.

    `name` stands in messages. A member of more than `largest` bytes is refused before it is read.
    """

    def __init__(self, file: Readable, name: str, largest: int) -> None:
        self._file, self._name, self._largest = file, name, largest
        self._at = 0
        self._long_name: str | None = None
        self._long_size: int | None = None

    def __iter__(self) -> Iterator[TarMember]:
        started: int | None = None
        while True:
            where, offset = f"{self._name} at byte {self._at}", self._at
            block = self._read(BLOCK)
            if not block and self._at > 0:
                return  # no end mark; GNU tar and Python accept that, too
            header = parse_header(block, where)
            if header is None:
                return
            started = offset if started is None else started
            if header.kind in (b"L", b"x", b"g"):
                self._extend(header, where)
                continue
            name, size = self._long_name or header.name, header.size if self._long_size is None else self._long_size
            self._long_name = self._long_size = None
            if header.kind == b"5":
                started = None
                continue
            if header.kind not in _REGULAR:
                what = _WHAT.get(header.kind, f"of type {header.kind!r}")
                raise DataError(f"{where}: {name!r} is {what}, not a file with data; make the archive without it")
            yield TarMember(name, self._data(size, name, where), started)
            started = None

    def _extend(self, header: TarHeader, where: str) -> None:
        """Apply an extended header to the next header."""
        if header.size > LONGEST_NAME:
            raise DataError(f"{where}: an extended header of {header.size} bytes, more than {LONGEST_NAME}; refused")
        raw = self._data(header.size, header.name, where)
        if header.kind == b"L":
            self._long_name = _text(raw)
        elif header.kind == b"x":
            self._pax(raw, where)

    def _pax(self, raw: bytes, where: str) -> None:
        at = 0
        while at < len(raw) and raw[at] != 0:
            try:
                length = int(raw[at : raw.index(b" ", at)])
                keyword, value = raw[at : at + length - 1].split(b" ", 1)[1].split(b"=", 1)
                size = int(value) if keyword == b"size" else None
            except (ValueError, IndexError):
                length, keyword, value, size = 0, b"", b"", None
            if length <= 0:
                raise DataError(f"{where}: an extended header that cannot be read; make the archive again")
            if keyword.startswith(b"GNU.sparse"):
                raise DataError(f"{where}: a sparse file; make the archive without --sparse")
            if keyword == b"path":
                self._long_name = value.decode("utf-8", "surrogateescape")
            elif size is not None:
                self._long_size = size
            at += length

    def _data(self, size: int, name: str, where: str) -> bytes:
        if not 0 <= size <= self._largest:
            raise DataError(
                f"{where}: {name!r} has {size} bytes, more than the largest sample ({self._largest}); "
                "open_source(path, largest=BYTES) allows larger ones"
            )
        data = self._read(size)
        if len(data) < size or len(self._read(padding(size))) < padding(size):
            raise DataError(f"{where}: cut off within {name!r}, {len(data)} of {size} bytes are left; copy it again")
        return data

    def _read(self, count: int) -> bytes:
        """`count` bytes, fewer at the end of the file."""
        pieces = []
        while count > 0 and (piece := self._file.read(min(count, 1 << 24))):
            pieces.append(piece)
            count -= len(piece)
            self._at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def split_name(name: str) -> tuple[str, str]:
    """(key, extension) by WebDataset's convention: the extension follows the first dot of the last part."""
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return f"{folder}{slash}{stem}", extension

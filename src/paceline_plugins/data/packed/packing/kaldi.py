# SPDX-License-Identifier: Apache-2.0
"""Kaldi's archives: `utt path:offset` lists (scp) and binary archives (ark) of features, vectors and wave files.

Source: kaldi-matrix.cc, kaldi-vector.cc and compressed-matrix.{h,cc} of https://github.com/kaldi-asr/kaldi. An archive
is a sequence of `key`, a space and a value. A binary value begins with "\\0B" and a token:

::

    FM DM       "\\4" rows:int32 "\\4" columns:int32, float32 or float64 [rows, columns]
    FV DV       "\\4" length:int32, float32 or float64 [length]
    CM CM2 CM3  min:float32 range:float32 rows:int32 columns:int32, then
                CM   four uint16 for each column (0, 25, 75 and 100 %), uint8 [columns, rows]
                CM2  uint16 [rows, columns]       CM3  uint8 [rows, columns]

All little endian. An archive holds wave files unchanged. Matrices become .npy members.
"""

from __future__ import annotations

import io
import os
import struct
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline_plugins.data.packed.packing.base import Members, too_large

LONGEST_KEY = 4096
_ITEM: dict[str, np.dtype[Any]] = {"F": np.dtype("<f4"), "D": np.dtype("<f8")}


class Reader:
    """Reads keys and values of an archive at the file's position; a value of more than `largest` bytes is refused."""

    def __init__(self, file: BinaryIO, name: str, largest: int) -> None:
        self._file, self._name, self._largest = file, name, largest
        self._size = os.fstat(file.fileno()).st_size

    def key(self) -> str | None:
        """The next key; None at the end."""
        begin = self._file.tell()
        raw = bytearray()
        while byte := self._file.read(1):
            if byte == b" ":
                if raw:
                    return raw.decode("utf-8", "surrogateescape")
                break
            raw += byte
            if len(raw) > LONGEST_KEY or byte in b"\0\n":
                break
        if not raw and not byte:
            return None
        raise DataError(f"{self._name} at byte {begin}: no key of an ark here ({bytes(raw[:20])!r}); is it one?")

    def value(self) -> Members:
        """The value here: {"npy": ...} or {"wav": ...}."""
        where = f"{self._name} at byte {self._file.tell()}"
        mark = self._exactly(2, where)
        if mark == b"RI":
            return {"wav": self._wave(where)}
        if mark != b"\0B":
            raise DataError(
                f"{where}: text, or no value of an ark ({mark!r}); only binary archives are read: write it with "
                "copy-feats ark,t:IN ark:OUT"
            )
        raw = io.BytesIO()
        np.save(raw, self._array(self._token(where), where), allow_pickle=False)
        return {"npy": raw.getvalue()}

    def _token(self, where: str) -> str:
        raw = b""
        while len(raw) < 8 and not raw.endswith(b" "):
            raw += self._exactly(1, where)
        return raw.decode("latin-1").rstrip(" ")

    def _array(self, token: str, where: str) -> NDArray[Any]:
        if token in ("FM", "DM"):
            rows, columns = self._count(where), self._count(where)
            return self._items(_ITEM[token[0]], (rows, columns), where)
        if token in ("FV", "DV"):
            return self._items(_ITEM[token[0]], (self._count(where),), where)
        if token in ("CM", "CM2", "CM3"):
            return self._compressed(token, where)
        raise DataError(f"{where}: a value of type {token!r}; FM, DM, FV, DV, CM, CM2, CM3 and wave files are read")

    def _count(self, where: str) -> int:
        size, count = struct.unpack("<bi", self._exactly(5, where))
        if size != 4 or count < 0:
            raise DataError(f"{where}: a damaged header (size {size}, count {count}); copy the ark again")
        return int(count)

    def _items(self, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> NDArray[Any]:
        count = int(np.prod(shape, dtype=object))
        return np.frombuffer(self._exactly(count * dtype.itemsize, where), dtype).reshape(shape)

    def _compressed(self, token: str, where: str) -> NDArray[Any]:
        low, width, rows, columns = struct.unpack("<ffii", self._exactly(16, where))
        if rows < 0 or columns < 0:
            raise DataError(f"{where}: a damaged header ({rows} rows, {columns} columns); copy the ark again")
        low, width = np.float32(low), np.float32(width)
        if token == "CM":
            points = self._items(np.dtype("<u2"), (columns, 4), where)
            marks = low + width * np.float32(1 / 65535) * points.astype(np.float32)
            found: NDArray[Any] = _piecewise(self._items(np.dtype("u1"), (columns, rows), where), marks).T
            return found
        most = 65535 if token == "CM2" else 255
        values = self._items(np.dtype("<u2" if token == "CM2" else "u1"), (rows, columns), where)
        found = low + values.astype(np.float32) * (width * np.float32(1 / most))
        return found

    def _wave(self, where: str) -> bytes:
        head = b"RI" + self._exactly(10, where)
        size = int.from_bytes(head[4:8], "little")
        if head[:4] != b"RIFF" or head[8:] != b"WAVE" or size in (0, 0xFFFFFFFF) or size < 4:
            raise DataError(f"{where}: no wave file whose header says its size; write it with wav-copy")
        return head + self._exactly(size - 4, where)

    def _exactly(self, count: int, where: str) -> bytes:
        left = self._size - self._file.tell()
        if count > left:
            raise DataError(f"{where}: needs {count} bytes, the file has {left} more; it is cut off or damaged")
        if count > self._largest:
            raise too_large(f"{where}: a value of {count} bytes, more than the largest sample ({self._largest})")
        return self._file.read(count)


def _piecewise(codes: NDArray[Any], marks: NDArray[Any]) -> NDArray[Any]:
    """codes [columns, rows], marks [columns, 4]; linear between the marks at the codes 0, 64, 192 and 255."""
    code = codes.astype(np.float32)
    p0, p25, p75, p100 = (marks[:, k : k + 1] for k in range(4))
    low = p0 + (p25 - p0) * code * np.float32(1 / 64)
    middle = p25 + (p75 - p25) * (code - 64) * np.float32(1 / 128)
    high = p75 + (p100 - p75) * (code - 192) * np.float32(1 / 63)
    found: NDArray[Any] = np.where(codes <= 64, low, np.where(codes <= 192, middle, high)).astype(np.float32)
    return found

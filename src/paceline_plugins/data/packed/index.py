# SPDX-License-Identifier: Apache-2.0
"""The index of a packed data set, and the offsets beside each shard.

::

    index.json         {"format": "paceline-packed", "version": 1, "samples": n, "shards": [
                         {"name", "bytes", "sha256", "samples", "offsets_sha256"}, ...]}
    shard-00000.tar    samples one after another, WebDataset's convention
    shard-00000.idx    .npy file, int64 little endian, [samples + 1]: where each sample begins, and where the last ends
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline_plugins.data.packed.tar import BLOCK, END

FORMAT = "paceline-packed"
VERSION = 1
INDEX = "index.json"
LARGEST_INDEX = 1 << 30  # bytes; some millions of shards
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class PackedShard:
    """One archive of a packed data set."""

    name: str
    bytes: int
    sha256: str
    samples: int
    offsets_sha256: str

    @property
    def offsets_name(self) -> str:
        """The name of its offsets file."""
        return self.name.removesuffix(".tar") + ".idx"

    @property
    def offsets_bytes(self) -> int:
        """Upper bound of that file's size; a larger one is not read."""
        return 8 * (self.samples + 1) + 4096


@dataclass(frozen=True)
class Index:
    """All shards, in order."""

    shards: tuple[PackedShard, ...]

    @property
    def samples(self) -> int:
        """Samples of the data set."""
        return sum(shard.samples for shard in self.shards)

    @property
    def total_bytes(self) -> int:
        """Bytes of all archives."""
        return sum(shard.bytes for shard in self.shards)

    def to_json(self) -> str:
        """The text of index.json, one shard a line."""
        lines = ",\n  ".join(json.dumps(asdict(shard)) for shard in self.shards)
        head = f'"format": "{FORMAT}", "version": {VERSION}, "samples": {self.samples}'
        return f'{{{head}, "shards": [\n  {lines}\n]}}\n'

    @classmethod
    def from_json(cls, raw: bytes, where: str) -> Index:
        """Read and check it; DataError if it is no index, of a later version, or inconsistent."""
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is no JSON ({error}); copy it again, or pack again") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise DataError(f'{where} is not the index of a packed data set (no "format": "{FORMAT}")')
        if found.get("version") != VERSION:
            raise DataError(f"{where} has version {found.get('version')!r}, this is for {VERSION}; update paceline")
        rows = found.get("shards")
        if not isinstance(rows, list) or not rows:
            raise DataError(f"{where} names no shards; copy it again, or pack again")
        index = cls(tuple(_shard(row, number, where) for number, row in enumerate(rows)))
        if len({shard.name for shard in index.shards}) < len(rows):
            raise DataError(f"{where} names a shard twice; pack again")
        if found.get("samples") != index.samples:
            raise DataError(
                f"{where} says {found.get('samples')!r} samples, its shards have {index.samples}; pack again"
            )
        return index


def _shard(row: Any, number: int, where: str) -> PackedShard:
    """One row; its name must not be a path."""
    match row:
        case {
            "name": str(name),
            "bytes": int(size),
            "sha256": str(sha256),
            "samples": int(samples),
            "offsets_sha256": str(offsets),
        }:
            good_texts = _PLAIN.fullmatch(name) and _HEX.fullmatch(sha256) and _HEX.fullmatch(offsets)
            if good_texts and name.endswith(".tar") and 0 < samples < size < 1 << 62:
                return PackedShard(name, size, sha256, samples, offsets)
    raise DataError(f"{where}: shard {number} makes no sense ({str(row)[:200]}); copy the index again, or pack again")


def offsets_to_bytes(offsets: NDArray[np.int64]) -> bytes:
    """The .npy file of the offsets, int64 [samples + 1]."""
    raw = io.BytesIO()
    np.save(raw, offsets.astype("<i8"), allow_pickle=False)
    return raw.getvalue()


def offsets_from_bytes(raw: bytes, shard: PackedShard, where: str) -> NDArray[np.int64]:
    """Read the offsets, int64 [samples + 1], and check that they fit the shard; DataError if not."""
    file = io.BytesIO(raw)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("not version 1.0 of .npy")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{where} cannot be read ({error}); copy it again, or pack again") from error
    body = raw[file.tell() :]  # numpy would allocate the header's size, so check that first
    fits = shape == (shard.samples + 1,) and dtype == np.dtype("<i8") and not by_columns
    if not fits or len(body) != 8 * (shard.samples + 1):
        seen = f"{dtype}{list(shape)} in {len(body)} bytes"
        raise DataError(f"{where} holds {seen}, not int64[{shard.samples + 1}]; copy it again, or pack again")
    found = np.frombuffer(body, dtype="<i8")
    steps = np.diff(found)
    if found[0] != 0 or (steps < BLOCK).any() or (found % BLOCK).any() or found[-1] != shard.bytes - len(END):
        raise DataError(f"{where} has offsets that do not fit {shard.name}; copy it again, or pack again")
    return found.astype(np.int64, copy=False)

# SPDX-License-Identifier: Apache-2.0
"""Parquet (needs `paceline[parquet]`): each row is a sample.

A column of bytes becomes a member `column.ext`, whose extension follows from the first bytes; so does a column of
{bytes, path}, as in image and audio data sets, whose extension follows from the path. All other columns together are
the member json; a null goes into the json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from paceline.errors import DataError
from paceline_plugins.data.packed.packing.base import FileSource, Members, Ready, Task, no_shuffle, too_large
from paceline_plugins.data.packed.parquet import parquet_errors, pyarrow_parquet

ROWS = 64  # decoded at a time
_MAGIC = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n", "png"),
    (b"GIF8", "gif"),
    (b"fLaC", "flac"),
    (b"OggS", "ogg"),
    (b"ID3", "mp3"),
    (b"\xff\xfb", "mp3"),
    (b"\x93NUMPY", "npy"),
    (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
    (b"%PDF", "pdf"),
)


class ParquetSource(FileSource):
    """The rows of Parquet files, one after another."""

    def tasks(self, seed: int | None) -> Iterator[Task]:
        """One task for each row."""
        if seed is not None:
            raise no_shuffle(str(self._paths[0]), "a Parquet file")
        parquet = pyarrow_parquet()
        for which, path in enumerate(self._paths):
            with parquet_errors(str(path)), parquet.ParquetFile(path) as file:
                yield from self._rows(file, which, path)

    def _rows(self, file: Any, which: int, path: Path) -> Iterator[Task]:
        number, count = 0, max(1, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=ROWS, use_threads=False):
            for row in batch.to_pylist():
                sample = sample_of(row, f"{path} row {number}")
                if sum(map(len, sample.values())) > self._largest:
                    raise too_large(f"{path} row {number}: more than {self._largest} bytes")
                yield Ready(sample)
                number += 1
            self.progress.fraction = (which + number / count) / len(self._paths)


def sample_of(row: Mapping[str, Any], where: str) -> Members:
    """A row's members; DataError if two columns would share a member, or JSON cannot hold a value."""
    members: Members = {}
    rest: dict[str, Any] = {}
    for column, value in row.items():
        found = _binary(column, value)
        if found is None:
            rest[column] = value
        elif found[0] in members:
            raise DataError(f"{where}: two columns would be the member {found[0]!r}; rename column {column!r}")
        else:
            members[found[0]] = found[1]
    if rest or not members:
        try:
            members["json"] = json.dumps(rest, default=_plain).encode()
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}: {error}; leave the column out, or make it plain, before packing") from error
    return members


def _binary(column: str, value: Any) -> tuple[str, bytes] | None:
    """(extension, bytes) of a value that becomes a member."""
    name = re.sub("[^A-Za-z0-9_-]", "_", column) or "_"
    if isinstance(value, bytes):
        return f"{name}.{_kind(value)}", value
    if isinstance(value, dict) and set(value) == {"bytes", "path"} and isinstance(value["bytes"], bytes):
        suffix = Path(str(value["path"] or "")).suffix[1:].lower()
        return f"{name}.{suffix if re.fullmatch('[a-z0-9]{1,8}', suffix) else _kind(value['bytes'])}", value["bytes"]
    return None


def _kind(raw: bytes) -> str:
    if raw[:4] == b"RIFF" and raw[8:12] in (b"WAVE", b"WEBP"):
        return "wav" if raw[8:12] == b"WAVE" else "webp"
    return next((extension for magic, extension in _MAGIC if raw.startswith(magic)), "bin")


def _plain(value: Any) -> Any:
    if isinstance(value, (datetime, date, time, timedelta, Decimal, UUID)):
        return str(value)
    raise TypeError(f"a {type(value).__name__} inside another value has no place in JSON")

# SPDX-License-Identifier: Apache-2.0
"""Rows of Parquet files as a map-style dataset (needs `paceline[parquet]`); row groups are its shards."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from paceline.checkpoint.urls import local_path, redacted, shown
from paceline.errors import DataError
from paceline_plugins.data.cache import Cache

DECODED_GROUPS = 4  # kept in memory


def pyarrow_parquet() -> Any:
    """The library; DataError if it is not installed."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("Parquet needs pyarrow, which is not installed: pip install 'paceline[parquet]'") from error
    return parquet


@contextlib.contextmanager
def parquet_errors(url: str) -> Iterator[None]:
    """Turn errors of pyarrow within the context into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{shown(url)} does not exist; check the path") from error
    except Exception as error:  # of pyarrow (ValueError, OSError, IndexError and others), or of a store's client
        raise DataError(f"cannot read {shown(url)} as Parquet: {redacted(' '.join(str(error).split()))}") from None


class _Group(NamedTuple):
    """The position of a row group."""

    url: str
    number: int  # within its file
    rows: int


class _Tables:
    """The row groups that were used last, decoded; empty in a forked child and after pickling."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Tables, ()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, number: int) -> Any:
        """The row group of this number; None where it is not kept."""
        if self._process != os.getpid():  # the lock may have been held at the fork
            self._clear()
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
            return self._kept.get(number)

    def keep(self, number: int, table: Any) -> Any:
        """Keep a row group, and drop the one that was used least recently; returns it."""
        with self._lock:
            self._kept[number] = table
            while len(self._kept) > DECODED_GROUPS:
                self._kept.popitem(last=False)
        return table


class ParquetDataset(Dataset[Any]):
    """The rows of Parquet files, in the order of the files; a row is a dict of column -> Python value.

    One row group is decoded at a time and four are kept. Without a cache, remote files are read by ranges: the footer
    at construction, row groups when they are needed. It can be pickled, and used in worker processes.

    >>> import tempfile
    >>> import pyarrow
    >>> from pyarrow import parquet
    >>> from paceline_plugins.data import ParquetDataset
    >>> path = tempfile.mkdtemp() + "/rows.parquet"
    >>> parquet.write_table(pyarrow.table({"x": [1, 2, 3], "y": [4, 5, 6]}), path)
    >>> ParquetDataset(path, columns=["x"])[2]
    {'x': 3}

    Args:
        paths: files, folders of them, or URLs of files.
        columns: which to read; None reads all.
        cache: fetches remote files as a whole.

    Attributes:
        cache: what fetches remote files.
        shard_sizes: rows in each row group, in order.

    Raises:
        DataError: a file is missing, is not Parquet, or lacks one of the columns.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        columns: Sequence[str] | None = None,
        cache: Cache | None = None,
    ) -> None:
        self._columns, self.cache = None if columns is None else list(columns), cache
        given = [paths] if isinstance(paths, (str, Path)) else list(paths)
        if not given:
            raise DataError("no Parquet file was given; give at least one path")
        self._groups = [group for url in _files(map(str, given)) for group in self._scan(url)]
        self.shard_sizes: Sequence[int] = [group.rows for group in self._groups]
        self._begins = np.cumsum([0, *self.shard_sizes], dtype=np.int64)  # [row groups + 1]
        self._tables = _Tables()

    @property
    def urls(self) -> Sequence[str]:
        """File of each row group, in order."""
        return [group.url for group in self._groups]

    def __len__(self) -> int:
        """Rows."""
        return int(self._begins[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row.

        Raises:
            IndexError: there is no such row.
            DataError: its file is missing or damaged.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several rows, in the order given; each row group is read once."""
        wanted: dict[int, list[tuple[int, int]]] = {}  # row group -> (position in the result, row)
        for position, index in enumerate(indices):
            number, row = self._find(index)
            wanted.setdefault(number, []).append((position, row))
        found: list[dict[str, Any]] = [{}] * len(indices)
        for number, rows in wanted.items():
            table = self._tables.get(number)
            if table is None:  # two threads may both read it
                table = self._tables.keep(number, self._table(self._groups[number]))
            table = table.take([row for _, row in rows])
            for (position, _), values in zip(rows, table.to_pylist(), strict=True):
                found[position] = values
        return found

    def prefetch(self, indices: Iterable[int]) -> None:
        """Let the cache fetch the files of these rows, in this order."""
        if self.cache is not None:
            urls = dict.fromkeys(self._groups[self._find(index)[0]].url for index in indices)
            self.cache.prefetch(urls)

    @property
    def shuffle_buffer(self) -> int:
        """Row groups whose rows are mixed: as many as stay decoded."""
        return DECODED_GROUPS

    def _find(self, index: int) -> tuple[int, int]:
        row = operator.index(index)
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = int(np.searchsorted(self._begins, row, side="right")) - 1
        return number, row - int(self._begins[number])

    def _scan(self, url: str) -> list[_Group]:
        """The row groups of a file."""
        with self._file(url, whole=False) as file:
            metadata = file.metadata
            missing = set(self._columns or ()) - set(file.schema_arrow.names)
            if missing:
                names = ", ".join(file.schema_arrow.names)
                raise DataError(f"{url} has no column {sorted(missing)[0]!r}; it has {names}")
            rows = [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)]
        return [_Group(url, number, count) for number, count in enumerate(rows) if count]

    def _table(self, group: _Group) -> Any:
        """A row group, decoded."""
        with self._file(group.url, whole=True) as file:
            # without pyarrow's threads, which a forked child does not inherit
            table = file.read_row_group(group.number, columns=self._columns, use_threads=False)
        if table.num_rows != group.rows:
            raise DataError(
                f"{group.url}: row group {group.number} has {table.num_rows} rows, had {group.rows} when this "
                "dataset was made; make it again"
            )
        return table

    @contextlib.contextmanager
    def _file(self, url: str, whole: bool) -> Iterator[Any]:
        """An open file; with `whole`, a remote one comes from the cache if there is one."""
        parquet = pyarrow_parquet()
        with parquet_errors(url), ExitStack() as stack:
            local = local_path(url)
            if local is not None:
                source: Any = str(local)
            elif whole and self.cache is not None:
                source = str(stack.enter_context(self.cache.open(url)))
            else:
                import fsspec

                source = stack.enter_context(fsspec.open(url, "rb"))
            yield stack.enter_context(parquet.ParquetFile(source))


def _files(given: Iterable[str]) -> Iterator[str]:
    """The files; a folder stands for its .parquet files in the order of their names."""
    for url in given:
        folder = local_path(url)
        if folder is None or not folder.is_dir():
            yield url
            continue
        found = sorted(p for p in folder.iterdir() if p.suffix in (".parquet", ".pq"))
        if not found:
            raise DataError(f"{url} holds no .parquet file; give the files themselves")
        yield from map(str, found)

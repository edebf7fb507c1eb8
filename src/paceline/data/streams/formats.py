# SPDX-License-Identifier: Apache-2.0
"""What is read in order as shards: files of lines or of rows, one shard each, and streams of Hugging Face."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.errors import UnsupportedError

Name = str | os.PathLike[str]
ROWS_AT_ONCE = 1024


def text_lines(paths: Sequence[Name], encoding: str = "utf-8") -> LineShards:
    """Text files, plain or `.gz`: a sample is a line, as `str` without its end. Empty lines are samples too.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from paceline.data import text_lines
    >>> path = Path(tempfile.mkdtemp()) / "lines.txt"
    >>> _ = path.write_text("one\\ntwo\\n")
    >>> list(text_lines([path]).read(shard=0, skip=0))
    ['one', 'two']

    Args:
        paths: one shard each, in this order.
        encoding: of the text.

    Raises:
        ValueError: a file is missing, or listed twice.
    """
    return LineShards(_checked(paths), encoding)


def json_lines(paths: Sequence[Name]) -> LineShards:
    """JSON lines, plain or `.gz`: a sample is the value of a line. Reading an invalid line raises ValueError.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from paceline.data import json_lines
    >>> path = Path(tempfile.mkdtemp()) / "rows.jsonl"
    >>> _ = path.write_text('{"x": 1}\\n{"x": 2}\\n')
    >>> list(json_lines([path]).read(shard=0, skip=1))
    [{'x': 2}]

    Args:
        paths: one shard each, in this order.

    Raises:
        ValueError: a file is missing, or listed twice.
    """
    return LineShards(_checked(paths), "utf-8", _json)


def parquet_rows(paths: Sequence[Name], columns: Sequence[str] | None = None) -> RowShards:
    """Parquet files: a sample is a row, as a dictionary of plain Python values. Needs `paceline[parquet]`.

    Args:
        paths: one shard each, in this order.
        columns: which to read; all by default.

    Raises:
        ValueError: a file is missing, or listed twice.
        UnsupportedError: pyarrow is not installed.
    """
    _parquet()
    return RowShards(_checked(paths), columns)


def hugging_face(dataset: Any) -> HuggingFaceShards:
    """A Hugging Face `IterableDataset` as shards, as many as it has (`dataset.num_shards`).

    ::

        data = datasets.load_dataset("json", data_files=files, streaming=True, split="train")
        stream = paceline.data.ShardStream(paceline.data.hugging_face(data), buffer=1000)

    Do not shuffle it: `ShardStream` does. A resume in the middle of a shard reads and skips the samples before.

    Args:
        dataset: may have `map`, `filter` and a format.

    Raises:
        UnsupportedError: it is no such data set.
    """
    if not all(hasattr(dataset, name) for name in ("num_shards", "shard", "skip")) or hasattr(dataset, "__len__"):
        raise UnsupportedError(
            f"{type(dataset).__name__} is no Hugging Face IterableDataset; put a Dataset into a DataLoader as it is"
        )
    return HuggingFaceShards(dataset)


class LineShards:
    """Shards of lines, made by :func:`text_lines` and :func:`json_lines`.

    Args:
        paths: of the files.
        encoding: of the text.
        parse: returns the sample of (line, path, number of the line from 1); by default the line.
    """

    def __init__(
        self, paths: Sequence[Path], encoding: str, parse: Callable[[str, Path, int], Any] | None = None
    ) -> None:
        self._paths, self._encoding, self._parse = paths, encoding, parse

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, shard: int, skip: int) -> Iterator[Any]:
        path = self._paths[shard]
        opened: Any = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding=self._encoding, newline="\n") as file:
            for number, line in enumerate(islice(file, skip, None), skip + 1):
                text = line.rstrip("\r\n")
                yield text if self._parse is None else self._parse(text, path, number)


class RowShards:
    """Shards of rows, made by :func:`parquet_rows`."""

    def __init__(self, paths: Sequence[Path], columns: Sequence[str] | None) -> None:
        self._paths, self._columns = paths, list(columns) if columns is not None else None

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, shard: int, skip: int) -> Iterator[dict[str, Any]]:
        """The rows of a file, without the first `skip`; row groups before them are not read."""
        with _parquet().ParquetFile(self._paths[shard]) as file:
            there = file.schema_arrow.names
            missing = sorted(set(self._columns or ()) - set(there))
            if missing:
                raise ValueError(f"{self._paths[shard]} has no column {', '.join(missing)}; it has {', '.join(there)}")
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if skip >= rows:
                    skip -= rows
                    continue
                for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=self._columns):
                    beyond, skip = batch.slice(skip), max(0, skip - len(batch))
                    yield from beyond.to_pylist()


class HuggingFaceShards:
    """Shards of a Hugging Face `IterableDataset`, made by :func:`hugging_face`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        count: int = self._dataset.num_shards
        return count

    def read(self, shard: int, skip: int) -> Iterator[Any]:
        from torch.utils.data._utils import worker

        part = self._dataset.shard(num_shards=len(self), index=shard)
        samples = iter(part.skip(skip) if skip else part)
        # as in the training process: else it would give its only shard to loader process 0
        info, worker._worker_info = worker._worker_info, None
        try:
            first = list(islice(samples, 1))
        finally:
            worker._worker_info = info
        yield from first
        yield from samples


def _checked(paths: Sequence[Name]) -> list[Path]:
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise ValueError(f"{os.fspath(paths)!r} is one name; give a list of files")
    files = [Path(path) for path in paths]
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise ValueError(f"{len(missing)} of {len(files)} files are not there, the first is {missing[0]}")
    if len(set(files)) < len(files):
        twice = next(path for path in files if files.count(path) > 1)
        raise ValueError(f"{twice} is in the list twice, so its samples would come twice")
    return files


def _json(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} of {path} is no JSON: {error}") from error


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UnsupportedError("Parquet files need pyarrow; run pip install 'paceline[parquet]'") from error
    return pyarrow.parquet

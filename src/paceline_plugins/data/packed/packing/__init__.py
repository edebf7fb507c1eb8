# SPDX-License-Identifier: Apache-2.0
"""The source that reads a path, for packing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import DataError
from paceline_plugins.data.packed.index import INDEX
from paceline_plugins.data.packed.packing.archive import TarSource
from paceline_plugins.data.packed.packing.base import (
    LARGEST_SAMPLE,
    Members,
    SampleSource,
    SourceProgress,
    Task,
    reading,
)
from paceline_plugins.data.packed.packing.folder import FolderSource
from paceline_plugins.data.packed.packing.jsonl import JsonlSource
from paceline_plugins.data.packed.packing.repack import RepackSource
from paceline_plugins.data.packed.packing.speech import ArkSource, ScpSource
from paceline_plugins.data.packed.packing.table import ParquetSource
from paceline_plugins.data.packed.storage import is_url, local_path

__all__ = ["LARGEST_SAMPLE", "Members", "SampleSource", "SourceProgress", "Task", "open_source"]

_COMPRESSED = r"(\.gz|\.bz2|\.xz|\.zst)?"
_KINDS: dict[str, Callable[[Sequence[Path], int], SampleSource]] = {
    rf".*(\.tar{_COMPRESSED}|\.tgz|\.txz|\.tbz2|\.tzst)": TarSource,
    rf".*\.(jsonl|ndjson){_COMPRESSED}": JsonlSource,
    r".*\.(parquet|pq)": ParquetSource,
    r".*\.ark": ArkSource,
}


def open_source(text: str, largest: int = LARGEST_SAMPLE) -> SampleSource:
    """The source at a path.

    A folder of only tars, only JSONL, only Parquet or only arks is read file by file, in the order of their names; the
    files of any other folder are samples.

    Args:
        text: a path.
        largest: bytes of a sample above which it is refused.

    Raises:
        DataError: it does not exist, or is of no kind that can be packed.
    """
    if is_url(text):
        raise DataError(f"{text}: a source must be a path of this machine; mount the storage or copy it first")
    path = local_path(text)
    if path.is_dir():
        return _folder(path, largest)
    if not path.exists():
        raise DataError(f"{path} does not exist; check the path")
    if path.suffix == ".scp":
        return ScpSource(path, largest)
    kind = _kind(path)
    if kind is None or not path.is_file():
        raise DataError(
            f"{path}: no source of a known kind; give a folder, or a file that ends in .tar (.gz .bz2 .xz .zst), "
            ".jsonl (the same), .parquet, .ark or .scp"
        )
    return _KINDS[kind]([path], largest)


def _kind(path: Path) -> str | None:
    return next((kind for kind in _KINDS if re.fullmatch(kind, path.name, re.IGNORECASE)), None)


def _folder(path: Path, largest: int) -> SampleSource:
    if (path / INDEX).is_file() and any(path.glob("*.idx")):
        return RepackSource(path)
    kinds: set[str | None] = set()
    files = []
    with reading(path), os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            kinds.add(_kind(Path(entry.name)) if entry.is_file() else None)
            if kinds == {None} or len(kinds) > 1:
                break  # a folder of samples, perhaps of very many
            files.append(Path(entry.path))
    if any(path.glob("*.scp")):
        raise DataError(f"{path} holds Kaldi's lists; give one of the .scp files itself")
    if len(kinds) == 1 and (kind := kinds.pop()) is not None:
        return _KINDS[kind](sorted(files), largest)
    return FolderSource(path, largest)

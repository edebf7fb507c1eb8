# SPDX-License-Identifier: Apache-2.0
"""Packed data: samples in uncompressed tar shards with an index, so that reading one takes one seek.

::

    packing/   folder, tar, JSONL, Parquet, Kaldi's ark and scp -> samples -> shards
    writer     samples -> shards and their index (index.py)
    dataset    PackedDataset: the shards as a map-style dataset, local or through a cache
    parquet    ParquetDataset: Parquet files as they are, row groups as shards
    verify     checksums, sizes, counts and offsets against the index
    plan       can a storage feed N workers? measured (measure.py), then judged
    tar        the archive format; storage: a directory or a URL; sizes: 64MiB, 1Gbit

The format is open: any tar reads a shard, and WebDataset iterates over it.
"""

from __future__ import annotations

from paceline.errors import DataError
from paceline_plugins.data.packed.dataset import FileCache, PackedDataset
from paceline_plugins.data.packed.packing import open_source
from paceline_plugins.data.packed.packing.pack import pack
from paceline_plugins.data.packed.parquet import ParquetDataset
from paceline_plugins.data.packed.verify import verify

__all__ = ["DataError", "FileCache", "PackedDataset", "ParquetDataset", "open_source", "pack", "verify"]

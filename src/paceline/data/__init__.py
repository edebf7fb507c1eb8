# SPDX-License-Identifier: Apache-2.0
"""Service 4, data distribution: every sample of an epoch enters the global model exactly once.

The ledger and the split are what `run.share` works with. `Cache`, `Files`, `PackedDataset` and `ParquetDataset` bring
the data: remote files through a cache that the workers of a host share, and packed shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.data.sampling.buckets import BucketBatches
    from paceline.data.sharing.loader_registry import LoaderRegistry
    from paceline.data.sharing.shared_loader import SharedLoader
    from paceline.data.streams.dataset import Shards, ShardStream
    from paceline.data.streams.formats import json_lines, parquet_rows, text_lines
    from paceline.data.streams.libraries import by_index, hugging_face, web_dataset
    from paceline_plugins.data.cache import Cache, Files
    from paceline_plugins.data.packed import PackedDataset, ParquetDataset
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "BucketBatches": "sampling.buckets",
            "Cache": "cache",
            "LoaderRegistry": "sharing.loader_registry",
            "Files": "cache",
            "PackedDataset": "packed",
            "ParquetDataset": "packed",
            "ShardStream": "streams.dataset",
            "Shards": "streams.dataset",
            "SharedLoader": "sharing.shared_loader",
            "by_index": "streams.libraries",
            "hugging_face": "streams.libraries",
            "json_lines": "streams.formats",
            "parquet_rows": "streams.formats",
            "text_lines": "streams.formats",
            "web_dataset": "streams.libraries",
        },
    )

__all__ = [
    "BucketBatches",
    "Cache",
    "Files",
    "LoaderRegistry",
    "PackedDataset",
    "ParquetDataset",
    "ShardStream",
    "Shards",
    "SharedLoader",
    "by_index",
    "hugging_face",
    "json_lines",
    "parquet_rows",
    "text_lines",
    "web_dataset",
]

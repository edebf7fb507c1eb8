# SPDX-License-Identifier: Apache-2.0
"""Floor 4, data distribution: every sample of an epoch in the global model exactly once, and never waited for.

The ledger and the split are what `run.share` works with. `Cache`, `Files`, `PackedDataset` and `ParquetDataset` bring
the data: remote files through a cache that the workers of a host share, and packed shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.data.buckets import BucketBatches
    from paceline.data.cache import Cache, Files
    from paceline.data.feed import Feed
    from paceline.data.files import json_lines, parquet_rows, text_lines
    from paceline.data.known import by_index, hugging_face, web_dataset
    from paceline.data.packed import PackedDataset, ParquetDataset
    from paceline.data.share import Share
    from paceline.data.streams import Shards, ShardStream
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "BucketBatches": "buckets",
            "Cache": "cache",
            "Feed": "feed",
            "Files": "cache",
            "PackedDataset": "packed",
            "ParquetDataset": "packed",
            "ShardStream": "streams",
            "Shards": "streams",
            "Share": "share",
            "by_index": "known",
            "hugging_face": "known",
            "json_lines": "files",
            "parquet_rows": "files",
            "text_lines": "files",
            "web_dataset": "known",
        },
    )

__all__ = [
    "BucketBatches",
    "Cache",
    "Feed",
    "Files",
    "PackedDataset",
    "ParquetDataset",
    "ShardStream",
    "Shards",
    "Share",
    "by_index",
    "hugging_face",
    "json_lines",
    "parquet_rows",
    "text_lines",
    "web_dataset",
]

# SPDX-License-Identifier: Apache-2.0
"""Service 4, data distribution: every sample of an epoch enters the global model exactly once.

The ledger and the split are what `run.share` works with. Remote files through a cache that the workers of a host share,
and Parquet, are in `paceline_plugins.data`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.data.sampling.buckets import BucketBatches
    from paceline.data.sharing.loader_registry import LoaderRegistry, SharedLoader
    from paceline.data.streams.dataset import Shards, ShardStream
    from paceline.data.streams.formats import hugging_face, json_lines, parquet_rows, text_lines
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "BucketBatches": "sampling.buckets",
            "LoaderRegistry": "sharing.loader_registry",
            "ShardStream": "streams.dataset",
            "Shards": "streams.dataset",
            "SharedLoader": "sharing.loader_registry",
            "hugging_face": "streams.formats",
            "json_lines": "streams.formats",
            "parquet_rows": "streams.formats",
            "text_lines": "streams.formats",
        },
    )

__all__ = [
    "BucketBatches",
    "LoaderRegistry",
    "ShardStream",
    "Shards",
    "SharedLoader",
    "hugging_face",
    "json_lines",
    "parquet_rows",
    "text_lines",
]

# SPDX-License-Identifier: Apache-2.0
"""Floor 4, data distribution: every sample of an epoch on exactly one worker."""

from __future__ import annotations

from paceline.data.buckets import BucketBatches
from paceline.data.feed import Feed
from paceline.data.files import json_lines, parquet_rows, text_lines
from paceline.data.known import by_index, hugging_face, web_dataset
from paceline.data.share import Share
from paceline.data.streams import Shards, ShardStream

__all__ = [
    "BucketBatches",
    "Feed",
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

# SPDX-License-Identifier: Apache-2.0
"""Floor 4, data distribution: every sample of an epoch in the global model exactly once, and never waited for.

The ledger and the split are what `run.share` works with. `Cache`, `Files`, `PackedDataset` and `ParquetDataset` bring
the data: remote files through a cache that the workers of a host share, and packed shards.
"""

from __future__ import annotations

from paceline.data.cache import Cache, Files
from paceline.data.feed import Feed
from paceline.data.packed import PackedDataset, ParquetDataset
from paceline.data.share import Share

__all__ = ["Cache", "Feed", "Files", "PackedDataset", "ParquetDataset", "Share"]

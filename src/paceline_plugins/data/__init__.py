# SPDX-License-Identifier: Apache-2.0
"""Packed data sets, a cache of remote files that the workers of a host share, and their commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline_plugins.data.cache import Cache, Files
    from paceline_plugins.data.packed import PackedDataset, ParquetDataset
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "Cache": "cache",
            "Files": "cache",
            "PackedDataset": "packed",
            "ParquetDataset": "packed",
        },
    )

__all__ = [
    "Cache",
    "Files",
    "PackedDataset",
    "ParquetDataset",
]

# SPDX-License-Identifier: Apache-2.0
"""A cache of remote files that the workers of a host share, and data sets of files and of Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline_plugins.data.cache import Cache, Files
    from paceline_plugins.data.parquet import ParquetDataset
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "Cache": "cache",
            "Files": "cache",
            "ParquetDataset": "parquet",
        },
    )


__all__ = [
    "Cache",
    "Files",
    "ParquetDataset",
]

# SPDX-License-Identifier: Apache-2.0
"""A cache of remote files that the workers of a host share, and data sets of files and of Parquet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline import extensions
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


def _cache_log(note: Callable[..., None]) -> Any:
    """A log of the caches of a run's data sets; whoever has one has imported this package."""
    from paceline_plugins.data.cache_log import CacheLog

    return CacheLog(note)


extensions.data_logs.append(_cache_log)

__all__ = [
    "Cache",
    "Files",
    "ParquetDataset",
]

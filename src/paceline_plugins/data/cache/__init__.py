# SPDX-License-Identifier: Apache-2.0
"""Remote files, fetched once a host and prefetched.

`cache` is the interface; `backend_choice` and the `..._backend` modules read the stores; `directory`, `ledger`,
`evict` and `locks` keep the directory; `get` and `download` fetch one file; `prefetcher` and `prefetch_hints` fetch
files before they are opened; `stats` counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily
from paceline.errors import CacheError, CorruptFileError, NotServedError

if TYPE_CHECKING:
    from paceline_plugins.data.cache.cache import Cache
    from paceline_plugins.data.cache.files import Files
    from paceline_plugins.data.cache.stats import Stats
else:
    __getattr__, __dir__ = lazily(__name__, {"Cache": "cache", "Files": "files", "Stats": "stats"})

__all__ = ["Cache", "CacheError", "CorruptFileError", "Files", "NotServedError", "Stats"]

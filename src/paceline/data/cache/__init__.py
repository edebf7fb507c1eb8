# SPDX-License-Identifier: Apache-2.0
"""Remote files, fetched once a host and there before they are asked for.

`cache` is the face; `source`, `objects`, `web` and `filesystems` know the stores; `store`, `ledger`, `evict` and
`locks` keep the directory; `download` and `obtain` bring one file; `fetcher` and `wishes` look ahead; `order` says in
which order to go through files when the cache holds only some of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily
from paceline.errors import CacheError, CorruptFileError, NotServedError

if TYPE_CHECKING:
    from paceline.data.cache.cache import Cache
    from paceline.data.cache.files import Files
    from paceline.data.cache.stats import Stats
else:
    __getattr__, __dir__ = lazily(__name__, {"Cache": "cache", "Files": "files", "Stats": "stats"})

__all__ = ["Cache", "CacheError", "CorruptFileError", "Files", "NotServedError", "Stats"]

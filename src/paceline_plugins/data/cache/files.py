# SPDX-License-Identifier: Apache-2.0
"""A list of files as a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from paceline.checkpoint.urls import local_path
from paceline_plugins.data.cache.cache import Cache


class Files(Dataset[Any]):
    """One sample a file: `files[i]` is `read(path)` of the i-th file, which stays in the cache while it is read.

    For a `DataLoader`, whose processes share the cache's directory.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from torch.utils.data import DataLoader
    >>> from paceline_plugins.data import Files
    >>> paths = [Path(tempfile.mkdtemp()) / f"{k}.txt" for k in range(4)]
    >>> for k, path in enumerate(paths):
    ...     _ = path.write_text(f"sample {k}")
    >>> list(DataLoader(Files(paths, read=Path.read_text), batch_size=2))
    [['sample 0', 'sample 1'], ['sample 2', 'sample 3']]

    Args:
        urls: URLs and local paths, mixed.
        cache: for remote files; None: one in the default directory, made for the first remote file.
        read: makes a sample of a path; after it returns, the file may be evicted.
    """

    def __init__(
        self, urls: Sequence[str | Path], cache: Cache | None = None, read: Callable[[Path], Any] = Path.read_bytes
    ) -> None:
        self.urls = [str(url) for url in urls]
        self._cache, self._read = cache, read

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, index: int) -> Any:
        url = self.urls[index]
        path = local_path(url)
        if path is not None:
            return self._read(path)
        with self.cache.open(url) as path:
            return self._read(path)

    @property
    def local(self) -> bool:
        """Whether all files are local, so that no cache is needed."""
        return all(local_path(url) is not None for url in self.urls)

    @property
    def cache(self) -> Cache:
        """The cache that holds the files."""
        if self._cache is None:
            self._cache = Cache()
        return self._cache

    def prefetch(self, indices: Iterable[int]) -> None:
        """Fetch the files of these samples in the background, in this order."""
        urls = [self.urls[index] for index in indices]
        if any(local_path(url) is None for url in urls):
            self.cache.prefetch(urls)

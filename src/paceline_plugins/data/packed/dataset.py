# SPDX-License-Identifier: Apache-2.0
"""A packed data set as a map-style dataset: a sample is one seek and one read."""

from __future__ import annotations

import operator
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from paceline.checkpoint.urls import shown
from paceline.errors import DataError
from paceline_plugins.data.cache import Cache
from paceline_plugins.data.packed.index import INDEX, LARGEST_INDEX, Index, PackedShard, offsets_from_bytes
from paceline_plugins.data.packed.recently_used import LruCache
from paceline_plugins.data.packed.storage import faults_of, is_url, join, local_path, read_up_to
from paceline_plugins.data.packed.tar import BLOCK, padding

BUFFER = 8  # shards whose samples are mixed
OPEN_SHARDS = 16  # kept in memory with their offsets (and open files, where they are local)


class FileCache(Protocol):
    """Fetches remote files."""

    def open(self, url: str, sha256: str | None = None) -> AbstractContextManager[Path]:
        """The file on this machine, which stays there within the context."""

    def prefetch(self, urls: Iterable[str]) -> None:
        """Fetch these in the background, in this order."""


class _File:
    """A file descriptor that is closed with its last reference, so that a thread may read an evicted shard."""

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class _ShardReader(NamedTuple):
    """A shard in use: its offsets, and its file where that is local."""

    offsets: NDArray[np.int64]  # [samples + 1]
    file: _File | None


class PackedDataset(Dataset[Any]):
    """The samples of a packed data set, in its order.

    A sample is a dict of member extension -> bytes, or the result of `decode`. The data set can be pickled, and used in
    forked or spawned loader processes.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from paceline_plugins.data import PackedDataset
    >>> from paceline_plugins.data.packed.writer import ShardWriter
    >>> folder = Path(tempfile.mkdtemp())
    >>> writer = ShardWriter(folder, shard_bytes=1 << 20)  # `paceline data pack` does this
    >>> for k in range(3):
    ...     writer.add({"txt": f"sample {k}".encode()})
    >>> _ = writer.finish()
    >>> data = PackedDataset(folder, decode=lambda sample: sample["txt"].decode())
    >>> len(data), data[1]
    (3, 'sample 1')

    Args:
        path_or_url: the directory with index.json, or a URL of one.
        decode: called with the dict of each sample.
        cache: fetches remote files; None: for a URL, a `Cache()` in the default directory, without a cap.

    Attributes:
        cache: what fetches remote files.
        shard_sizes: samples in each shard, in order.

    Raises:
        DataError: there is no index, or it is damaged.
        NotServedError, CacheError: the source refuses the index, or does not answer.
    """

    def __init__(
        self,
        path_or_url: str | Path,
        decode: Callable[[dict[str, bytes]], Any] | None = None,
        cache: FileCache | None = None,
    ) -> None:
        self._root, self._decode = str(path_or_url), decode
        self._remote = is_url(self._root)
        self.cache: FileCache | None = Cache() if self._remote and cache is None else cache
        where = join(self._root, INDEX)
        with self._file(where) as path, faults_of(where):
            if path.stat().st_size > LARGEST_INDEX:
                raise DataError(f"{shown(where)} has more than {LARGEST_INDEX} bytes; it is damaged or no index")
            self._index = Index.from_json(path.read_bytes(), shown(where))
        self.shard_sizes: Sequence[int] = [shard.samples for shard in self._index.shards]
        self._begins = array("q", accumulate(self.shard_sizes, initial=0))  # [shards + 1]
        self._open_shards = LruCache[_ShardReader](OPEN_SHARDS)

    @property
    def urls(self) -> Sequence[str]:
        """URL or path of each shard, in order."""
        return [join(self._root, shard.name) for shard in self._index.shards]

    def __len__(self) -> int:
        """Samples."""
        return self._begins[-1]

    def __getitem__(self, index: int) -> Any:
        """One sample.

        Raises:
            IndexError: there is no such sample.
            DataError: its shard is missing or damaged.
        """
        members = self.members(index)
        return members if self._decode is None else self._decode(members)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples, in the order given; each shard is opened once, neighbours are one read."""
        found: dict[int, dict[str, bytes]] = {}
        for number, samples in self._by_shard(indices).items():
            with self._shard(number) as (descriptor, offsets):
                for first, last in _runs(sorted(samples)):
                    read = self._read(descriptor, offsets, number, first, last)
                    found.update(zip(range(first, last + 1), read, strict=True))
        members = [dict(found[self._checked(index)]) for index in indices]
        return members if self._decode is None else [self._decode(sample) for sample in members]

    def members(self, index: int) -> dict[str, bytes]:
        """One sample as it is packed: extension -> bytes."""
        sample = self._checked(index)
        number = bisect_right(self._begins, sample) - 1
        with self._shard(number) as (descriptor, offsets):
            return self._read(descriptor, offsets, number, sample, sample)[0]

    def prefetch(self, indices: Iterable[int]) -> None:
        """Let the cache fetch the shards of these samples, in this order."""
        if self.cache is not None and self._remote:
            shards = [self._index.shards[number] for number in self._by_shard(indices)]
            self.cache.prefetch(join(self._root, n) for shard in shards for n in (shard.offsets_name, shard.name))

    @property
    def shuffle_buffer(self) -> int:
        """Shards whose samples are mixed: eight, or as many as fit into a sixteenth of the cache.

        Each worker of a host needs the buffer that it reads and the next.
        """
        cap: int | None = getattr(self.cache, "cap_bytes", None)
        if not self._remote or cap is None or not self._index.shards:
            return BUFFER
        return max(1, min(BUFFER, cap // 16 // max(shard.bytes for shard in self._index.shards)))

    @property
    def turns(self) -> bool:
        """Whether an epoch begins with the shards that ended the last one, because the cache does not hold all."""
        cap: int | None = getattr(self.cache, "cap_bytes", None)
        return self._remote and cap is not None and cap < sum(shard.bytes for shard in self._index.shards)

    def _checked(self, index: int) -> int:
        sample = operator.index(index)
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {self._root}, which has {len(self)}")
        return sample

    def _by_shard(self, indices: Iterable[int]) -> dict[int, set[int]]:
        grouped: dict[int, set[int]] = {}
        for index in indices:
            sample = self._checked(index)
            grouped.setdefault(bisect_right(self._begins, sample) - 1, set()).add(sample)
        return grouped

    def _file(self, where: str, sha256: str | None = None) -> AbstractContextManager[Path]:
        if self.cache is not None and self._remote:
            return self.cache.open(where, sha256)
        return nullcontext(local_path(where))

    def _where(self, number: int) -> str:
        return join(self._root, self._index.shards[number].name)

    @contextmanager
    def _shard(self, number: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(file descriptor, offsets [samples + 1]) of a shard, valid within the context."""
        shard = self._index.shards[number]
        opened = self._open_shards.get(number, partial(self._open, shard))
        if opened.file is not None:
            yield opened.file.descriptor, opened.offsets
            return
        where = join(self._root, shard.name)
        with self._file(where, shard.sha256) as path:
            file = _opened(path, shard, where)  # closed with this reference
            yield file.descriptor, opened.offsets

    def _open(self, shard: PackedShard) -> _ShardReader:
        where = join(self._root, shard.offsets_name)
        with self._file(where, shard.offsets_sha256) as path, faults_of(where), path.open("rb") as file:
            offsets = offsets_from_bytes(read_up_to(file, shard.offsets_bytes), shard, where)
        name = join(self._root, shard.name)
        return _ShardReader(offsets, None if self._remote else _opened(Path(name), shard, name))

    def _read(
        self, descriptor: int, offsets: NDArray[np.int64], number: int, first: int, last: int
    ) -> list[dict[str, bytes]]:
        """The samples first .. last of a shard, in one read."""
        start = self._begins[number]
        bounds = offsets[first - start : last - start + 2].tolist()
        begin, count = bounds[0], bounds[-1] - bounds[0]
        try:
            raw = os.pread(descriptor, count, begin)
            while len(raw) < count and (more := os.pread(descriptor, count - len(raw), begin + len(raw))):
                raw += more  # the kernel gives at most 2 GiB at a time
        except OSError as error:
            raise DataError(f"cannot read {self._where(number)}: {error.strerror}") from error
        found = []
        for sample, (low, high) in zip(range(first, last + 1), pairwise(bounds), strict=True):
            members = split_sample(raw[low - begin : high - begin], f"{sample:09d}.")
            if members is None or high - begin > len(raw):
                raise DataError(
                    f"{self._where(number)} is damaged at byte {low} (sample {sample}); see `paceline data verify`"
                )
            found.append(members)
        return found


def _runs(samples: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of every run of neighbours."""
    first = last = samples[0]
    for sample in samples[1:]:
        if sample != last + 1:
            yield first, last
            first = sample
        last = sample
    yield first, last


def split_sample(raw: bytes, key: str) -> dict[str, bytes] | None:
    """The members of one sample, whose names begin with `key`; None where `raw` is damaged."""
    members: dict[str, bytes] = {}
    at = 0
    while at < len(raw):
        try:
            name = raw[at : at + 100].rstrip(b"\0").decode("ascii")
            size = int(raw[at + 124 : at + 135], 8)
        except ValueError:
            return None
        begin = at + BLOCK
        at = begin + size + padding(size)
        extension = name.removeprefix(key)
        if size < 0 or at > len(raw) or extension == name or extension in members:
            return None
        members[extension] = raw[begin : begin + size]
    return members


def _opened(path: Path, shard: PackedShard, where: str) -> _File:
    """The shard's file, if its size is right."""
    with faults_of(where):
        file = _File(path)
        size = os.fstat(file.descriptor).st_size
    if size != shard.bytes:
        raise DataError(f"{shown(where)} has {size} bytes, the index says {shard.bytes}; copy it again, or pack again")
    return file

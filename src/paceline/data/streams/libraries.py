# SPDX-License-Identifier: Apache-2.0
"""Adapters for data sets of other libraries: Hugging Face datasets, WebDataset, litdata.

A Hugging Face `Dataset` (not `IterableDataset`) needs no adapter: it has a length and an index, and its `DataLoader` is
shared directly.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset

from paceline.errors import UnsupportedError

_NOTHING = object()


def hugging_face(dataset: Any) -> HuggingFaceShards:
    """A Hugging Face `IterableDataset` as shards, as many as it has (`dataset.num_shards`).

    ::

        data = datasets.load_dataset("json", data_files=files, streaming=True, split="train")
        stream = paceline.data.ShardStream(paceline.data.hugging_face(data), buffer=1000)

    Do not shuffle it: `ShardStream` does. A resume in the middle of a shard reads and skips the samples before.

    Args:
        dataset: may have `map`, `filter` and a format.

    Raises:
        UnsupportedError: it is no such data set.
    """
    if not all(hasattr(dataset, name) for name in ("num_shards", "shard", "skip")) or hasattr(dataset, "__len__"):
        raise UnsupportedError(
            f"{type(dataset).__name__} is no Hugging Face IterableDataset; put a Dataset into a DataLoader as it is"
        )
    return HuggingFaceShards(dataset)


def web_dataset(urls: str | Sequence[str], prepare: Callable[[Any], Any] | None = None) -> TarShards:
    """Tar files in the manner of WebDataset: each is a shard. Needs `paceline[webdataset]`.

    ::

        def pairs(tar):
            return tar.decode("torchrgb").to_tuple("jpg", "cls")

        tars = paceline.data.web_dataset("train-{0000..0099}.tar", pairs)
        loader = DataLoader(paceline.data.ShardStream(tars, buffer=1000), batch_size=64, num_workers=4)

    Args:
        urls: anything that WebDataset opens; braces are expanded.
        prepare: maps the `WebDataset` of one file to the iterable of samples: decode, rename, filter; no shuffling.
            By default samples are dictionaries of bytes. If loader processes are spawned, it must be a function of
            a module.

    Raises:
        UnsupportedError: webdataset is not installed.
    """
    expand = _webdataset().shardlists.expand_urls
    names = [urls] if isinstance(urls, str) else list(urls)
    return TarShards([shard for name in names for shard in expand(name)], prepare)


def by_index(dataset: Any) -> Indexed:
    """A litdata `StreamingDataset` as a data set with a length and an index, for a `DataLoader` with `shuffle=True`.

    A `StreamingDataset` is iterable and splits itself evenly over workers. With this wrapper `run.share` splits it,
    exactly under every rule; it shuffles chunks, and the samples of a few chunks, so that each worker reads few chunks
    at a time.

    Args:
        dataset: made without `drop_last`; its own `shuffle` has no effect.

    Raises:
        UnsupportedError: it is no such data set.
    """
    return Indexed(dataset)


class HuggingFaceShards:
    """Shards of a Hugging Face `IterableDataset`, made by :func:`hugging_face`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        count: int = self._dataset.num_shards
        return count

    def read(self, shard: int, skip: int) -> Iterator[Any]:
        part = self._dataset.shard(num_shards=len(self), index=shard)
        samples = iter(part.skip(skip) if skip else part)
        with _no_loader_process():  # else it would give its only shard to loader process 0
            first = next(samples, _NOTHING)
        if first is not _NOTHING:
            yield first
            yield from samples


class TarShards:
    """Shards of WebDataset, made by :func:`web_dataset`."""

    def __init__(self, urls: Sequence[str], prepare: Callable[[Any], Any] | None) -> None:
        self._urls, self._prepare = urls, prepare

    def __len__(self) -> int:
        return len(self._urls)

    def read(self, shard: int, skip: int) -> Iterator[Any]:
        samples = _webdataset().WebDataset(
            [self._urls[shard]], shardshuffle=False, nodesplitter=None, workersplitter=None, empty_check=False
        )
        prepared = iter(samples if self._prepare is None else self._prepare(samples))
        for _ in range(skip):
            next(prepared, None)
        yield from prepared


class Indexed(Dataset[Any]):
    """A `StreamingDataset` by index, made by :func:`by_index`.

    Attributes:
        shard_sizes: samples of each chunk; `run.share` keeps neighbours of a chunk together where it can.
    """

    def __init__(self, dataset: Any) -> None:
        self._process, self._source = os.getpid(), dataset
        if not hasattr(dataset, "cache") or not hasattr(dataset, "get_len"):
            raise UnsupportedError(f"{type(dataset).__name__} is no StreamingDataset of litdata; share it as it is")
        if dataset.cache is None:
            _ = dataset[0]  # opens the index
        try:
            intervals = dataset.cache._reader.config.intervals
            self.shard_sizes = [int(one.roi_end_idx - one.roi_start_idx) for one in intervals]
        except AttributeError as error:
            raise UnsupportedError(
                f"this litdata does not tell the sizes of its chunks ({error}); use 0.2.76"
            ) from error

    def __len__(self) -> int:
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> Any:
        if self._process != os.getpid():  # open files and threads do not survive a fork
            self._process, self._source = os.getpid(), copy.copy(self._source)
            self._source.cache = None
        return self._source[index]


@contextlib.contextmanager
def _no_loader_process() -> Iterator[None]:
    """Inside, `get_worker_info()` returns None, as in the training process."""
    from torch.utils.data._utils import worker

    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


def _webdataset() -> Any:
    try:
        import webdataset
    except ImportError as error:
        raise UnsupportedError("tar files need webdataset; run pip install 'paceline[webdataset]'") from error
    return webdataset

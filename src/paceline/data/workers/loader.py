# SPDX-License-Identifier: Apache-2.0
"""Makes requested batches with the settings of the user's `DataLoader`.

Without loader processes, samples are fetched and collated directly. With them, an inner `DataLoader` sends blocks of
batches (:mod:`paceline.data.workers.batching`), each block in one message.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from paceline.core import rng
from paceline.data.workers.batching import (
    BLOCK_BYTES,
    BLOCK_S,
    LARGE_BYTES,
    BatchRequest,
    OrderedBatches,
    Packer,
    RequestBlocks,
)

# Randomness in loader processes that is a function of (seed, epoch, sample) alone.
#
# So an augmentation depends neither on the process or worker that makes it, nor on where a run was resumed. The three
# global generators (torch, NumPy, Python) are seeded before every sample.
#
# Seeding the last two takes longer than fetching and sending a sample of 1 KB, and most datasets draw from neither.
# So if the first blocks drew nothing from them, they are not seeded, and their state is compared after each block.
# The first block that does draw is made again, seeded, and from then on every sample is. The result is the same as if
# every sample were seeded, unless a sample reads the state of NumPy's or Python's global generator without drawing
# from it.

PROBED_BLOCKS = 4


class Seeds:
    """Seeds the samples that one process makes; `seed` is the run's."""

    def __init__(self, seed: int) -> None:
        self._seed, self._last = seed, 0
        self._probes = PROBED_BLOCKS
        self._watching = False
        self._before: tuple[Any, ...] = ()

    def begin_block(self) -> None:
        if self._watching:
            self._before = _state()

    def sow(self, epoch: int, what: Any) -> None:
        """Seed the next sample, fetched by the index `what`, or the next batch, fetched by a list of them."""
        self._last = number = rng.mix(self._seed, epoch, zlib.crc32(repr(what).encode()))
        if self._watching:
            torch.default_generator.manual_seed(number)
        else:
            rng.seed_all(number)

    def must_repeat(self) -> bool:
        """Whether the block drew from a generator without a seed; then every later sample is seeded."""
        if self._watching:
            self._watching = _state() == self._before
            return not self._watching
        if self._probes:  # only watch, once several blocks drew nothing after their last seed
            now = _state()
            rng.seed_all(self._last)
            untouched = _state() == now
            self._probes = self._probes - 1 if untouched else 0
            self._watching = untouched and self._probes == 0
        return False


def _state() -> tuple[Any, ...]:
    """The states of NumPy's and Python's global generators."""
    kind, keys, *rest = np.random.get_state()
    return (kind, np.asarray(keys).tobytes(), *rest, random.getstate())


class Loading:
    """Makes batches as the user's loader would.

    It keeps the dataset (`__getitems__` included), collate_fn, num_workers, pin_memory, timeout, worker_init_fn,
    multiprocessing_context, prefetch_factor and persistent_workers. Batches come in the order of their requests even
    with in_order=False, so that the caller knows which batch is done. Nothing is drawn from the global generators, nor
    from the loader's own.

    Args:
        users: a loader with a map-style dataset; its samplers are not used.
        seed: of the randomness in loader processes, a function of (seed, epoch, sample) alone.
    """

    def __init__(self, users: DataLoader[Any], seed: int) -> None:
        self._fetcher = _Fetcher(users.dataset, users.collate_fn)
        self._source = PassSampler()
        self._in_blocks = users.num_workers > 0
        self._loader: DataLoader[Any] | None = None
        if self._in_blocks or users.pin_memory or users.timeout:
            data = _BlockDataset(self._fetcher, users.dataset, seed) if self._in_blocks else self._fetcher
            self._loader = DataLoader(data, **inner_settings(users, self._source))

    def batches(self, requests: Iterator[BatchRequest]) -> Iterator[Any]:
        """One batch for each request, in order.

        Requests are drawn as needed; with loader processes up to prefetch_factor x num_workers + 1 blocks ahead. An
        error of the iterator of requests comes after the batches before it. An error in a sample comes in place of its
        batch, of the type that a `DataLoader` raises; the next call returns the next batch.

        Raises:
            RuntimeError: a loader process died, or sent nothing within the loader's timeout.
        """
        if self._loader is None:
            return map(self._fetcher.__getitem__, requests)
        if not self._in_blocks:
            self._source.send(requests)
            return iter(self._loader)
        blocks = RequestBlocks(requests)
        self._source.send(blocks)
        return OrderedBatches(blocks, iter(self._loader))


def inner_settings(users: DataLoader[Any], source: PassSampler) -> dict[str, Any]:
    """Arguments of the inner loader, taken over from the user's; `source` yields its requests."""
    settings: dict[str, Any] = {
        "num_workers": users.num_workers,
        "pin_memory": users.pin_memory,
        "timeout": users.timeout,
        "multiprocessing_context": users.multiprocessing_context,
        "generator": torch.Generator(),  # so that making an iterator leaves the global generator alone
        "batch_size": None,
        "collate_fn": identity,
        "sampler": source,
    }
    if users.num_workers > 0:
        settings["prefetch_factor"] = users.prefetch_factor
        settings["persistent_workers"] = users.persistent_workers
        settings["worker_init_fn"] = ProcessInit(users.worker_init_fn)
    return settings


class _Fetcher(Dataset[Any]):
    """Makes the batch of a request, as PyTorch's own fetcher does."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate
        self._at_once = bool(getattr(dataset, "__getitems__", None))

    def __getitem__(self, request: BatchRequest) -> Any:
        ids = request.ids if type(request.ids) is list else list(request.ids)
        if self._at_once:
            return self._collate(self._dataset.__getitems__(ids))
        dataset = self._dataset
        return self._collate([dataset[i] for i in ids])

    def seeded(self, request: BatchRequest, seeds: Seeds) -> Any:
        """The same in a loader process, seeded for each sample, or for each batch that `__getitems__` fetches."""
        ids, collate = list(request.ids), self._collate
        if collate is default_collate:
            collate = _collate_in_private
        if self._at_once:
            seeds.sow(request.epoch, ids)
            return collate(self._dataset.__getitems__(ids))
        samples = []
        for i in ids:
            seeds.sow(request.epoch, i)
            samples.append(self._dataset[i])
        return collate(samples)


def _collate_in_private(samples: Any) -> Any:
    """`default_collate` without its file of shared memory for every small tensor."""
    from torch.utils.data._utils.collate import collate, default_collate_fn_map

    return collate(samples, collate_fn_map={**default_collate_fn_map, Tensor: _stack})


def _stack(samples: Sequence[Tensor], *, collate_fn_map: Any = None) -> Any:
    """Stack n tensors to (n, ...); a large tensor, which is sent separately, goes to shared memory at once."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    first = samples[0]
    plain = type(first) is Tensor and first.layout is torch.strided and not first.is_nested
    if plain and len(samples) * first.numel() * first.element_size() <= LARGE_BYTES:
        return torch.stack(tuple(samples), 0)
    return default_collate_fn_map[Tensor](samples, collate_fn_map=collate_fn_map)


class _BlockDataset(Dataset[Any]):
    """The inner loader's data set in a loader process: makes blocks of batches."""

    def __init__(self, fetcher: _Fetcher, dataset: Any, seed: int) -> None:
        self.users, self._fetcher, self._seeds = dataset, fetcher, Seeds(seed)

    def __getitem__(self, block: list[BatchRequest]) -> Packer:
        if not block:
            return Packer()
        began = time.monotonic()
        self._seeds.begin_block()
        packer = self._pack(block)
        if self._seeds.must_repeat():
            packer = self._pack(block)
        packer.made_s = time.monotonic() - began
        return packer

    def _pack(self, block: list[BatchRequest]) -> Packer:
        packer, began = Packer(), time.monotonic()
        for request in block:
            try:
                packer.add(self._fetcher.seeded(request, self._seeds))
            except Exception:  # sent as a `DataLoader` does
                info = get_worker_info()
                where = f"in DataLoader worker process {info.id if info is not None else 0}"
                packer.add_error(ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]
            if packer.nbytes >= BLOCK_BYTES or time.monotonic() - began > BLOCK_S:
                break
        return packer


class ProcessInit:
    """The user's worker_init_fn, to which `get_worker_info().dataset` is the user's dataset."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None:
            object.__setattr__(info, "dataset", info.dataset.users)  # type: ignore[attr-defined]
        if self._users is not None:
            self._users(worker)


class PassSampler:
    """The inner loader's sampler, whose requests are set before each pass.

    It holds no reference to the code that sets it: a reference cycle would keep persistent processes alive.
    """

    def __init__(self) -> None:
        self._now: Iterator[Any] = iter(())

    def send(self, requests: Iterator[Any]) -> None:
        """Of the next pass."""
        self._now = requests

    def __iter__(self) -> Iterator[Any]:
        return self._now


def identity(batch: Any) -> Any:
    """The inner loader's collate_fn: the data set returns batches."""
    return batch

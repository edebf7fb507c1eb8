# SPDX-License-Identifier: Apache-2.0
"""Batches made with the settings of the user's `DataLoader`, from tickets that say which samples.

In the training process samples are fetched and collated directly. With worker processes a PyTorch `DataLoader` runs
them, but what it hands over are blocks of batches (:mod:`paceline.data.parcel`), since small batches cost a process
more to send than to make. A block starts as one batch and doubles in every step. It is at most

- 64 batches,
- about 1 MiB: measured batches set the number, and a process ends a block early where it outgrows that,
- what the training uses up, or what a process makes, in a tenth of a second: where a step takes longer than that, or
  a batch does, batches go one by one, so that nobody holds tickets far ahead of need.

At most prefetch_factor x num_workers blocks are under way, as many as a `DataLoader` would have batches; so beyond what
a `DataLoader` holds, memory is at most 1 MiB for each of twice as many blocks.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from paceline import randomness
from paceline.data.parcel import LARGE_BYTES, Packer, Parcel

MOST_BATCHES = 64
BLOCK_BYTES = 1024 * 1024
BLOCK_S = 0.1


@dataclass(frozen=True)
class Ticket:
    """One batch to make.

    Attributes:
        epoch: together with a sample's id it seeds what is random in the sample.
        ids: what the user's dataset is indexed with, one for each sample.
    """

    epoch: int
    ids: Sequence[Any]


class Loading:
    """Makes batches as the user's loader would.

    Kept are the dataset (`__getitems__` included), collate_fn, num_workers, pin_memory, timeout, worker_init_fn,
    multiprocessing_context, prefetch_factor and persistent_workers. Batches come in the order of their tickets whatever
    the loader's in_order says, because who hands out tickets must know which batch is done. Nothing is drawn from
    the global generators nor from the loader's own.

    Args:
        users: a loader with a map-style dataset; its samplers are not asked.
        seed: of what is random in worker processes; it is a function of (seed, epoch, sample) alone.
    """

    def __init__(self, users: DataLoader[Any], seed: int) -> None:
        self._direct = users.num_workers == 0 and not users.pin_memory and not users.timeout
        self._make = _Maker(users.dataset, users.collate_fn)
        self._tickets: Iterator[Ticket] = iter(())
        self._blocks = _Blocks(self._tickets)
        settings: dict[str, Any] = {
            "num_workers": users.num_workers,
            "pin_memory": users.pin_memory,
            "timeout": users.timeout,
            "multiprocessing_context": users.multiprocessing_context,
            "generator": torch.Generator(),  # so that making an iterator leaves the global generator alone
            "batch_size": None,
            "collate_fn": _as_it_is,
            "sampler": _Restarting(self._begin),
        }
        self._in_blocks = users.num_workers > 0
        if self._direct:
            return
        if not self._in_blocks:
            self._loader: DataLoader[Any] = DataLoader(_OneByOne(self._make), **settings)
            return
        settings["prefetch_factor"] = users.prefetch_factor
        settings["persistent_workers"] = users.persistent_workers
        settings["worker_init_fn"] = _Init(users.worker_init_fn)
        self._loader = DataLoader(_Kitchen(self._make, users.dataset, seed), **settings)

    def batches(self, tickets: Iterator[Ticket]) -> Iterator[Any]:
        """One batch for each ticket, in order.

        Tickets are drawn when they are needed, with worker processes up to prefetch_factor x num_workers + 1 blocks
        ahead. An error that drawing one raises comes after the batches of the tickets before it. An error in a sample
        comes in the place of its batch, of the type that a `DataLoader` raises; the next call gives the next batch.

        Raises:
            RuntimeError: a worker process died, or gave nothing within the loader's timeout.
        """
        if self._direct:
            return map(self._make, tickets)
        self._tickets = tickets
        if not self._in_blocks:
            return iter(self._loader)
        self._blocks = _Blocks(tickets)
        return _Delivery(self._blocks, iter(self._loader))

    def _begin(self) -> Iterator[Any]:
        """What the inner loader takes as the indices of the pass that begins."""
        return self._blocks if self._in_blocks else self._tickets


class _Maker:
    """From a ticket to a batch, as PyTorch's own fetcher does it; `before` is told of what is fetched next."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate
        self._at_once = bool(getattr(dataset, "__getitems__", None))

    def __call__(self, ticket: Ticket) -> Any:
        ids = ticket.ids if type(ticket.ids) is list else list(ticket.ids)
        if self._at_once:
            return self._collate(self._dataset.__getitems__(ids))
        dataset = self._dataset
        return self._collate([dataset[i] for i in ids])

    def seeded(self, ticket: Ticket, seed: int) -> Any:
        """The same, with all that is random a function of (seed, epoch, sample).

        So an augmentation does not depend on which process or which worker makes it, nor on where a run was resumed.
        For a dataset that fetches a batch at a time it is the batch, not the sample, that seeds.
        """
        ids, collate = list(ticket.ids), self._collate
        if collate is default_collate:
            collate = _collate_in_private
        if self._at_once:
            _reseed(seed, ticket.epoch, ids)
            return collate(self._dataset.__getitems__(ids))
        samples = []
        for i in ids:
            _reseed(seed, ticket.epoch, i)
            samples.append(self._dataset[i])
        return collate(samples)


def _reseed(seed: int, epoch: int, what: Any) -> None:
    randomness.seed_all(randomness.mix(seed, epoch, zlib.crc32(repr(what).encode())))


def _collate_in_private(samples: Any) -> Any:
    """As default_collate, which in a worker process makes a file of shared memory for every tensor, however small."""
    from torch.utils.data._utils.collate import collate, default_collate_fn_map

    return collate(samples, collate_fn_map={**default_collate_fn_map, Tensor: _stack})


def _stack(samples: Sequence[Tensor], *, collate_fn_map: Any = None) -> Any:
    """(n, ...) of n tensors; what travels by itself is made where it will lie, in shared memory."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    first = samples[0]
    plain = type(first) is Tensor and first.layout is torch.strided and not first.is_nested
    if plain and len(samples) * first.numel() * first.element_size() <= LARGE_BYTES:
        return torch.stack(tuple(samples), 0)
    return default_collate_fn_map[Tensor](samples, collate_fn_map=collate_fn_map)


class _OneByOne(Dataset[Any]):
    """What the inner loader asks for batches where there are no worker processes."""

    def __init__(self, make: _Maker) -> None:
        self._make = make

    def __getitem__(self, ticket: Ticket) -> Any:
        return self._make(ticket)


class _Kitchen(Dataset[Any]):
    """What a worker process asks for blocks."""

    def __init__(self, make: _Maker, dataset: Any, seed: int) -> None:
        self.users, self._make, self._seed = dataset, make, seed

    def __getitem__(self, block: list[Ticket]) -> Parcel:
        packer, began = Packer(), time.monotonic()
        for ticket in block:
            try:
                packer.add(self._make.seeded(ticket, self._seed))
            except Exception:
                info = get_worker_info()
                packer.add_error(ExceptionWrapper(where=f"in DataLoader worker process {info.id if info else 0}"))
            if packer.nbytes >= BLOCK_BYTES or time.monotonic() - began > BLOCK_S:
                break
        return packer.parcel(left=len(block) - len(packer))


class _Init:
    """The user's worker_init_fn, which finds the user's dataset where PyTorch's documentation says."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None:
            object.__setattr__(info, "dataset", info.dataset.users)  # type: ignore[attr-defined]
        if self._users is not None:
            self._users(worker)


class _Restarting:
    """A sampler that asks at the start of every pass what to iterate over."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


def _as_it_is(made: Any) -> Any:
    return made


class _Blocks:
    """Cuts the tickets of one pass into blocks, as the inner loader asks for them.

    A block may come back with its last batches not made. They are asked for again before any new ticket is drawn, and
    while a block is out that may come back so, the inner loader is kept going with empty blocks.
    """

    def __init__(self, tickets: Iterator[Ticket]) -> None:
        self._tickets = tickets
        self._out: deque[tuple[int, list[Ticket]]] = deque()  # (number of its first ticket, block), as they were sent
        self._again: deque[tuple[int, list[Ticket]]] = deque()
        self._drawn, self._ended = 0, False
        self.size = 1
        self.error: Exception | None = None  # that drawing a ticket raised

    def __iter__(self) -> Iterator[list[Ticket]]:
        return self

    def __next__(self) -> list[Ticket]:
        if self._again:
            first, block = self._again.popleft()
        else:
            first, block = self._drawn, self._draw()
            self._drawn += len(block)
        if not block and not any(sent for _, sent in self._out):
            raise StopIteration
        self._out.append((first, block))
        return block

    def _draw(self) -> list[Ticket]:
        """Up to `size` tickets; fewer where the source is slow or at its end."""
        block: list[Ticket] = []
        began = time.monotonic()
        while not self._ended and len(block) < self.size and (not block or time.monotonic() - began < BLOCK_S):
            try:
                block.append(next(self._tickets))
            except StopIteration:
                self._ended = True
            except Exception as error:
                self.error, self._ended = error, True
        return block

    def came(self, parcel: Parcel) -> int:
        """The block that was sent first came back: the number of its first ticket."""
        first, block = self._out.popleft()
        missing = block[len(parcel) :]
        made = first + len(parcel)
        self._again.extend((made + k, [ticket]) for k, ticket in enumerate(missing))
        return first

    def adapt(self, parcel: Parcel, batch_s: float | None) -> None:
        """The next block's size from what came and from the seconds that a batch lasts (None: not known yet)."""
        most = min(MOST_BATCHES, 2 * self.size, BLOCK_BYTES * len(parcel) // max(1, parcel.nbytes))
        if batch_s is not None:
            most = min(most, int(BLOCK_S / max(batch_s, 1e-9)))
        self.size = max(1, 1 if parcel.left else most)


class _Delivery:
    """Batches of one pass, in order, out of parcels that may come in parts."""

    def __init__(self, blocks: _Blocks, parcels: Iterator[Parcel]) -> None:
        self._blocks, self._parcels = blocks, parcels
        self._early: dict[int, Parcel] = {}  # by the number of the first ticket
        self._number, self._index = 0, 0  # of the next ticket: in the pass, in its parcel
        self._parcel: Parcel | None = None
        self._came_at: float | None = None  # when the parcel in hand was reached
        self._handed_out = 0  # since then

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self._parcel is None or self._index == len(self._parcel):
            self._parcel = None  # its memory is free before more comes
            self._parcel, self._index = self._following(), 0
        index = self._index
        self._index, self._number, self._handed_out = index + 1, self._number + 1, self._handed_out + 1
        return self._parcel.batch(index)

    def _following(self) -> Parcel:
        """The parcel that begins with the next ticket; receives until it is there."""
        while self._number not in self._early:
            self._receive()
        return self._early.pop(self._number)

    def _receive(self) -> None:
        try:
            parcel = next(self._parcels)
        except StopIteration:
            error, self._blocks.error = self._blocks.error, None
            if error is not None:
                raise error from None
            raise
        except Exception:
            self._parcels = iter(())  # which block that was cannot be told; without the iterator the processes end
            raise
        first = self._blocks.came(parcel)
        if not len(parcel):
            return
        now = time.monotonic()
        pace = (now - self._came_at) / self._handed_out if self._came_at is not None and self._handed_out else None
        self._came_at, self._handed_out = now, 0
        self._blocks.adapt(parcel, pace)
        self._early[first] = parcel

# SPDX-License-Identifier: Apache-2.0
"""`run.share(loader)`: the user's loader, of which each worker sees its part.

With one worker the user's loader itself is iterated. With several, a map-style `DataLoader` is rebuilt around a batch
sampler of ours and keeps everything else (collate, worker processes, pinning); the order of an epoch comes from the
user's own sampler, run on every worker from a seed made of (seed, epoch). Any other iterable of batches is dealt in
turn.

The position is the number of batches that were handed out in this epoch. After a resume, iteration goes on there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from paceline import randomness
from paceline.data.split import deal_batches, even_parts, worker_batches
from paceline.errors import UnsupportedError
from paceline.world import World


class Position:
    """How far a worker is in its data; a few numbers of the checkpoint.

    Attributes:
        epoch: passes over the data that have been begun, less one.
        batches: batches handed out in this epoch.
        epoch_start: random state at the epoch's start, kept only where the user's own loader is iterated.
        generators: the loader's own generators, where it has some.
    """

    def __init__(self) -> None:
        self.epoch, self.batches = 0, 0
        self.fresh = True  # no batch of this epoch was asked for yet
        self.epoch_start: dict[str, Any] | None = None
        self.generators: list[torch.Generator] = []
        self._loaded: list[Tensor] = []

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        now = [generator.get_state() for generator in self.generators]
        return {"epoch": self.epoch, "batches": self.batches, "epoch_start": self.epoch_start, "generators": now}

    def load(self, state: dict[str, Any]) -> None:
        """From the checkpoint; the next iteration goes on from here."""
        self.epoch, self.batches, self.epoch_start = state["epoch"], state["batches"], state["epoch_start"]
        self.fresh, self._loaded = True, state["generators"]
        self.track(self.generators)

    def track(self, generators: list[torch.Generator]) -> None:
        """The generators that the user's loader draws from are part of the position."""
        self.generators = generators
        if generators and self._loaded:
            _set_states(generators, self._loaded)
            self._loaded = []

    def begin(self) -> int:
        """Start to iterate: the number of batches to pass over (not 0 only after a resume)."""
        if not self.fresh:  # the last pass was left early
            self.epoch, self.batches = self.epoch + 1, 0
        self.fresh = False
        return self.batches

    def end(self) -> None:
        """The epoch is complete."""
        self.epoch, self.batches, self.fresh = self.epoch + 1, 0, True


class Share:
    """A worker's part of a loader; iterate it once for each epoch.

    Args:
        loader: a `DataLoader`, or any iterable of batches that every worker sees in the same order.
        world: this worker.
        seed: of the order of samples; the same on every worker.
        position: how far this worker is.
        handed_out: called with (samples, nominal batch size) for every batch; samples is 0 where unknown.
        began: called with (epoch, number of batches or None) at the start of an epoch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        world: World,
        seed: int,
        position: Position,
        handed_out: Callable[[int, int], None],
        began: Callable[[int, int | None], None],
    ) -> None:
        self.loader, self._world, self._seed, self._position = loader, world, seed, position
        self._handed_out, self._began = handed_out, began
        self._plan: _Plan | None = None
        if world.size == 1:
            position.track(_generators(loader))
        if world.size > 1 and isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            self._plan = _Plan(loader, world, seed, position)

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or comes next; the first is 0."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """As DistributedSampler's: take the order of this epoch."""
        if epoch != self._position.epoch:
            self._position.epoch, self._position.batches, self._position.fresh = epoch, 0, True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)  # dataset, batch_size and whatever else the user's script asks for

    def __len__(self) -> int:
        """Batches of this worker in an epoch."""
        if self._plan is not None:
            return len(self._plan)
        length: int = len(self.loader)  # type: ignore[arg-type]
        if self._world.size == 1:
            return length
        return length // self._world.size + (1 if length % self._world.size else 0)

    def __iter__(self) -> Iterator[Any]:
        if self._world.size == 1:
            batches = self._users_own()
        elif self._plan is not None:
            batches = self._planned(self._plan)
        else:
            batches = self._dealt()
        yield from batches
        self._position.end()

    def _announce(self) -> None:
        try:
            length: int | None = len(self)
        except TypeError:
            length = None  # an iterable without a length
        self._began(self._position.epoch, length)

    def _hand_out(self, batch: Any, samples: int, nominal: int) -> Any:
        self._position.batches += 1
        self._handed_out(samples, nominal)
        return batch

    def _users_own(self) -> Iterator[Any]:
        """One worker: the loader as it is. After a resume the epoch's start is played again up to the position."""
        skip = self._position.begin()
        now = randomness.capture()
        generators = self._position.generators
        start = self._position.epoch_start
        replay = skip > 0 and start is not None
        if replay and start is not None:
            randomness.restore(start)
            _set_states(generators, start["loader"])
        else:
            self._position.epoch_start = {**now, "loader": [g.get_state() for g in generators]}
        self._announce()
        batches = iter(self.loader)
        for _ in range(skip):
            next(batches, None)
        if replay:
            randomness.restore(now)
        nominal = getattr(self.loader, "batch_size", None) or 0
        for batch in batches:
            yield self._hand_out(batch, samples_in(batch), nominal)

    def _planned(self, plan: _Plan) -> Iterator[Any]:
        skip = self._position.begin()
        self._announce()
        for batch, samples in zip(plan.batches(skip), plan.sizes(skip), strict=True):
            yield self._hand_out(batch, samples, plan.batch_size)

    def _dealt(self) -> Iterator[Any]:
        """Any iterable: rounds of N batches, one for each worker; the last, incomplete round is cut up."""
        skip = self._position.begin()
        self._announce()
        size, rank = self._world.size, self._world.rank
        round_: list[Any] = []
        done, nominal = 0, 0
        for batch in self.loader:
            round_.append(batch)
            if len(round_) == size:
                mine, round_ = round_[rank], []
                done += 1
                nominal = nominal or samples_in(mine)
                if done > skip:
                    yield self._hand_out(mine, samples_in(mine), nominal)
        done += 1
        mine = _piece_of_rest(round_, size, rank) if round_ else None
        if mine is not None and done > skip:
            yield self._hand_out(mine, samples_in(mine), nominal or samples_in(mine))


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators of a loader and its samplers, each once."""
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = [loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _set_states(generators: list[torch.Generator], states: list[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)


class _Plan:
    """A map-style loader rebuilt around the epoch's split."""

    def __init__(self, loader: DataLoader[Any], world: World, seed: int, position: Position) -> None:
        self._users, self._world, self._seed, self._position = loader, world, seed, position
        self._skip = 0
        self._cached: tuple[int, list[list[Any]]] | None = None
        self.batch_size = loader.batch_size or 0
        if loader.batch_size is None and loader.batch_sampler is None:
            raise UnsupportedError(
                "the loader has batch_size=None, so its samples are batches already; give it a batch_size, or share "
                "the list of batches instead"
            )
        self._loader = self._rebuild()

    def _rebuild(self) -> DataLoader[Any]:
        users = self._users
        settings: dict[str, Any] = {
            "num_workers": users.num_workers,
            "collate_fn": users.collate_fn,
            "pin_memory": users.pin_memory,
            "timeout": users.timeout,
            "worker_init_fn": users.worker_init_fn,
            "multiprocessing_context": users.multiprocessing_context,
            "generator": torch.Generator(),  # so that making an iterator leaves the global generator alone
        }
        dataset = users.dataset
        if users.num_workers > 0:
            settings["prefetch_factor"] = users.prefetch_factor
            settings["persistent_workers"] = users.persistent_workers
            wrapper = _ReseededBatches if hasattr(dataset, "__getitems__") else _Reseeded
            dataset = wrapper(dataset, self._seed)
        return DataLoader(dataset, batch_sampler=_Batches(self), **settings)

    def _order(self, sampler: Any, epoch: int) -> list[Any]:
        """What the sampler gives in this epoch, the same on every worker, without touching any generator."""
        if isinstance(sampler, SequentialSampler):
            return list(sampler)
        seed = randomness.mix(self._seed, epoch)
        if isinstance(sampler, DistributedSampler):  # it would split (and pad) a second time
            count = len(sampler.dataset)  # type: ignore[arg-type]
            if not sampler.shuffle:
                return list(range(count))
            return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        owner = getattr(sampler, "sampler", sampler)  # a BatchSampler draws from the sampler within
        own = getattr(owner, "generator", None)
        before = own.get_state() if own is not None else None
        with randomness.seeded(seed):
            if own is not None:
                own.manual_seed(seed)
            found = list(sampler)
        if own is not None and before is not None:
            own.set_state(before)
        return found

    def all_batches(self) -> list[list[Any]]:
        """This worker's batches of the present epoch, as indices into the dataset."""
        epoch = self._position.epoch
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._make(epoch))
        return self._cached[1]

    def _make(self, epoch: int) -> list[list[Any]]:
        users, world = self._users, self._world
        if users.batch_size is None or type(users.batch_sampler) is not BatchSampler:
            everything = self._order(users.batch_sampler, epoch)
            self.batch_size = self.batch_size or (len(everything[0]) if everything else 0)
            return [list(batch) for batch in deal_batches(everything, world.size, world.rank)]
        order = self._order(users.sampler, epoch)
        if users.drop_last:
            order = order[: len(order) // users.batch_size * users.batch_size]
        bounds = worker_batches(len(order), users.batch_size, world.size, world.rank)
        return [order[begin:end] for begin, end in bounds]

    def __len__(self) -> int:
        return len(self.all_batches())

    def sizes(self, skip: int) -> list[int]:
        """Samples in each batch from the `skip`-th on."""
        return [len(batch) for batch in self.all_batches()[skip:]]

    def batches(self, skip: int) -> Iterator[Any]:
        """The batches themselves, from the `skip`-th on; those before are not loaded."""
        self._skip = skip
        return iter(self._loader)

    def tickets(self) -> Iterator[list[Any]]:
        """Indices for the loader, with the epoch beside them where worker processes need it."""
        epoch, remaining = self._position.epoch, self.all_batches()[self._skip :]
        if self._users.num_workers == 0:
            yield from remaining
        else:
            yield from ([(epoch, index) for index in batch] for batch in remaining)


class _Batches:
    """The batch sampler of the rebuilt loader."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[list[Any]]:
        return self._plan.tickets()

    def __len__(self) -> int:
        return len(self._plan)


class _Reseeded(Dataset[Any]):
    """A dataset whose randomness, in worker processes, is a function of (seed, epoch, sample) alone.

    So an augmentation does not depend on which process or which worker makes it, nor on where a run was resumed.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, ticket: tuple[int, Any]) -> Any:
        epoch, index = ticket
        self._reseed(epoch, index)
        return self._dataset[index]

    def _reseed(self, epoch: int, what: Any) -> None:
        if get_worker_info() is not None:
            randomness.seed_all(randomness.mix(self._seed, epoch, zlib.crc32(repr(what).encode())))


class _ReseededBatches(_Reseeded):
    """The same for a dataset that fetches a batch at a time; the batch, not the sample, seeds it."""

    def __getitems__(self, tickets: list[tuple[int, Any]]) -> Any:
        indices = [index for _, index in tickets]
        self._reseed(tickets[0][0], indices)
        return self._dataset.__getitems__(indices)  # type: ignore[attr-defined]


def samples_in(batch: Any) -> int:
    """Samples in a batch: the first dimension of the first tensor or array in it; 0 where that cannot be told."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for part in batch:
            found = samples_in(part)
            if found:
                return found
        return 0
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) > 0 else 0


def _piece_of_rest(rest: list[Any], workers: int, rank: int) -> Any:
    """Worker `rank`'s piece of the last, incomplete round: each batch of it is cut among some of the workers."""
    for number, (low, high) in enumerate(even_parts(workers, len(rest))):
        if low <= rank < high:
            batch = rest[number]
            if samples_in(batch) == 0:  # nothing to cut it by: it stays whole
                return batch if rank == low else None
            begin, end = even_parts(samples_in(batch), high - low)[rank - low]
            return _rows(batch, begin, end) if begin < end else None
    return None


def _rows(batch: Any, begin: int, end: int) -> Any:
    """Samples begin .. end (excl.) of a batch."""
    if isinstance(batch, dict):
        return {key: _rows(value, begin, end) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_rows(value, begin, end) for value in batch))
    if isinstance(batch, (list, tuple)) and any(hasattr(part, "shape") for part in batch):
        return type(batch)(_rows(value, begin, end) for value in batch)
    if isinstance(batch, Tensor) and batch.dim() == 0:
        return batch
    return batch[begin:end]

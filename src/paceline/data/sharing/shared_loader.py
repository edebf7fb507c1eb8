# SPDX-License-Identifier: Apache-2.0
"""`run.share(loader)`: each worker's part of the user's loader.

If all workers make the same number of steps, the part is a function of (seed, epoch, N), without communication
(:mod:`paceline.data.sampling.split`); asynchronous workers lease it (:mod:`paceline.data.ledger.ledger`). After a
resume, iteration continues after the last batch. :mod:`.iteration` makes the batches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from paceline.data.ledger.epoch_ledger import ENDLESS
from paceline.data.ledger.leases import Leases
from paceline.data.sampling.assignment import Portion
from paceline.data.sampling.batches import are_whole, has_piece
from paceline.data.sampling.position import Position
from paceline.data.sampling.sampler import SamplingPlan
from paceline.data.sampling.split import split_of
from paceline.data.sharing.completion import can_complete
from paceline.data.sharing.iteration import Iteration
from paceline.data.sharing.lists import ListPlan
from paceline.data.sharing.run_data import RunData
from paceline.errors import UnsupportedError

if TYPE_CHECKING:
    from paceline.core.world import World

_END = object()


class SharedLoader:
    """A worker's part of a loader; iterate it once for each epoch.

    Args:
        loader: a `DataLoader`, or any iterable of batches that every worker sees in the same order.
        number: of the loader's data, alike on all workers.
        position: this worker's.
        registry: counts every batch.
        leases: the connection to the ledger; None for an even split.
    """

    measured = False
    """Whether the program has asked for the length."""

    def __init__(
        self, loader: Iterable[Any], number: int, position: Position, registry: RunData, leases: Leases | None = None
    ) -> None:
        self.loader, self._position, self._registry, self._leases = loader, position, registry, leases
        position.leased = leases is not None
        self._iteration = Iteration(loader, number, position, registry, leases)
        self._before = (0, 0, 0)
        self.again = False
        """Whether its data were shared before."""

    @property
    def _world(self) -> World:
        return self._registry.world

    # -- for the program --------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The active or next epoch; the first is 0."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to this epoch, as with `DistributedSampler`.

        Raises:
            UnsupportedError: places are leased, and the epoch lies before the present one.
        """
        if self._leases is not None and epoch < self._position.epoch:
            raise UnsupportedError(
                self._world.sign(
                    f"set_epoch({epoch}) goes back from epoch {self._position.epoch}, and under an asynchronous rule "
                    "an epoch that has been gone through is over; count on, or use run.share(loader, even=True)"
                )
            )
        self._position.go_to(epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)  # dataset, batch_size, ...

    @property
    def progress(self) -> float:
        """The fraction of the epoch that was handed out; a schedule can follow it under every rule.

        If batches are leased, it follows the furthest place that this worker was given, not its own steps.
        """
        iteration = self._iteration
        epoch, place = iteration.reached
        if self._leases is None and iteration.shards is None:
            return min(1.0, self._position.now.batches / max(1, self._length() or ENDLESS))
        if iteration.shards is not None:
            total = iteration.shards.places
        else:
            total = iteration.plan.places(epoch) if iteration.plan is not None else len(self.loader)  # type: ignore[arg-type]
        return place / max(1, total) if epoch == self._position.epoch else 0.0

    @property
    def leased(self) -> bool:
        """Whether its batches are leased, so that a fast worker gets more of them."""
        return self._leases is not None

    def goes_by(self, position: Position | None) -> bool:
        """Whether `position` is this loader's."""
        return self._position is position

    def __len__(self) -> int:
        """Batches of this worker in an epoch; if they are leased, as if all workers were equally fast."""
        self.measured = True
        shown = sys._getframe(1).f_globals.get("__name__", "").startswith("tqdm")
        if self._leases is not None and self._world.size > 1 and not shown:
            self._registry.warn(
                "length",
                "the length of a shared loader is that of an even split, and under an asynchronous rule a fast worker "
                "gets more batches and a slow one fewer, so that the last one cannot be told by it; use "
                "run.share(loader, even=True), or share.progress",
            )
        return self.batches_of_worker()

    def batches_of_worker(self, rank: int | None = None) -> int:
        """The same, for code that is not the program's.

        Args:
            rank: of another worker.

        Raises:
            TypeError: the loader has no length.
        """
        iteration, epoch = self._iteration, self._position.epoch
        world = self._world if rank is None else replace(self._world, rank=rank)
        size, rank = world.size, world.rank
        plan: SamplingPlan | ListPlan | None = None if iteration.as_it_is else iteration.plan or iteration.listed
        if plan is None:
            return self._batches_of_iterable(len(self.loader), rank)  # type: ignore[arg-type]
        rest = self._position.rest[epoch] if self._position.others else iteration.rest(plan.places(epoch))
        if rest.total >= ENDLESS // 2:
            raise TypeError(f"a loader whose {type(self.loader).__name__} has no end has no length")
        split = split_of(plan.cut(rest.total, size))
        last = rest.total // size * size
        if plan.tail != "pieces" or last == rest.total:
            return split.batches(plan.stripe_of(world, epoch))
        if plan.streamed(epoch) is not None:  # too long to look at its end
            return len(split)
        return len(split) - 1 + plan.has_piece(Portion(epoch, rest.cut(last, rest.total), (rank, size)))

    def _batches_of_iterable(self, length: int, rank: int) -> int:
        full, rest = divmod(length, self._world.size)
        if not rest or are_whole(self.loader):
            return full
        batch = getattr(self.loader, "batch_size", None)
        samples = [batch or self._world.size] * rest
        if batch and isinstance(self.loader, DataLoader):
            samples[-1] = len(self.loader.dataset) - (length - 1) * batch  # type: ignore[arg-type]
        return full + has_piece(samples, self._world.size, rank)

    # -- the pass ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return self.batches()

    def batches(self) -> Generator[Any, None, None]:
        """One pass; closing the generator ends the pass early."""
        self._registry.ready()
        self._position.let_go()
        self._registry.leave(self._position)
        self._registry.settle()
        skip = self._position.begin()
        length = self._length()
        batches = self._iteration.batches(skip, length)
        if self._leases is not None:
            self._position.iteration = batches
        self._before = self._registry.since
        token = self._registry.begins(self._position, length, self._fewest)
        complete = False
        try:
            while True:
                self._check_alone(batches)
                take = self._registry.asked(self._position)  # decided before the next batch is fetched
                began = time.perf_counter()
                batch = next(batches, _END)
                self._registry.waited(time.perf_counter() - began)
                if batch is _END:
                    break
                if take is not None:
                    take()
                yield batch
            complete = True
        finally:
            self._registry.ends(self._position, token, complete)
            batches.close()
        if complete:
            self._position.end()
        self._registry.settle()

    def leave(self) -> None:
        """The program has left its pass, of which it may still hold the iterator."""
        self._registry.leave(self._position)

    @property
    def read_as_a_whole(self) -> bool:
        """Whether every worker iterates over the whole loader, and takes its own batches."""
        iteration = self._iteration
        return iteration.plan is None and iteration.listed is None and iteration.shards is None

    # -- a pass that turns out to be an evaluation ------------------------------------------------

    @property
    def completes(self) -> bool:
        """Whether `rest` can give the other workers' batches of the epoch."""
        iteration = self._iteration
        if iteration.plan is None or iteration.as_it_is or self._leases is not None:
            return False
        return can_complete(iteration.plan, self._position, self._world.size)

    @property
    def full_batch(self) -> bool:
        """Whether a worker's first batch is a whole batch of the loader."""
        iteration = self._iteration
        if iteration.plan is None or iteration.as_it_is:
            return True
        return iteration.plan.places(self._position.epoch) >= iteration.plan.unit * self._world.size

    def rest(self, epoch: int, batches: int) -> Iterator[Any]:
        """The other workers' batches of a pass without training, of which this one has seen its first `batches`.

        That pass must be over or closed.
        """
        self._registry.untrained(self._before)
        return self._iteration.rest_of(epoch, batches)

    def _length(self) -> int | None:
        try:
            return self.batches_of_worker()
        except TypeError:
            return None  # an iterable without a length

    def _fewest(self) -> int:
        """Batches of the worker that has the fewest in this pass; without a length nobody knows."""
        try:
            return min(map(self.batches_of_worker, range(self._world.size)))
        except TypeError:
            return ENDLESS

    def _check_alone(self, batches: Generator[Any, None, None]) -> None:
        if self._leases is not None and self._position.iteration is not batches:
            raise UnsupportedError(
                self._world.sign(
                    "another pass over the same data has begun within this one, and this one's leases went to "
                    "other workers; share the inner loader with a dataset of its own, such as copy.copy(dataset)"
                )
            )

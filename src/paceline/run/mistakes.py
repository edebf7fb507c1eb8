# SPDX-License-Identifier: Apache-2.0
"""Warns of common mistakes of the program: a loader that is not shared, a scheduler that counts the minibatches of all
workers, a loader without batches. Only rank 0 warns of mistakes that concern all workers."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from paceline.communication.diagnosis import in_library
from paceline.core.world import World
from paceline.data.sharing.loader_registry import LoaderRegistry
from paceline.errors import UnsupportedError
from paceline.run.validation import MARK

logger = logging.getLogger("paceline")
PLAIN_SAMPLERS = (RandomSampler, SequentialSampler, WeightedRandomSampler)
"""Samplers over a whole data set; another sampler may select this worker's part."""
OWN_FILES = ("/paceline/data/", "/paceline/doors/adapters/", "/paceline_plugins/zero/")
TOLERANCE = 0.02
_active: weakref.WeakSet[Mistakes] = weakref.WeakSet()


class Mistakes:
    """Warns of one worker's mistakes; `data` is that of `Settings`."""

    def __init__(self, world: World, loaders: LoaderRegistry, data: str) -> None:
        self._world, self._loaders, self._own = world, loaders, data == "own"
        self._thread = threading.get_ident()
        self.passes: list[tuple[weakref.ref[Any], int, str]] = []  # iterator, samples, calling line
        self._warned: set[str] = set()
        self._schedulers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # steps made
        loaders.warn_by(self._warn, self._on_empty_pass)
        if world.size > 1 and data != "split":
            _active.add(self)
            _patch_loaders_and_schedulers()

    def _warn(self, key: str, text: str, everywhere: bool = False) -> None:
        if key not in self._warned and (everywhere or self._world.rank == 0):
            self._warned.add(key)
            logger.warning("%s", self._world.sign(text))

    # -- data -------------------------------------------------------------------------------------

    def on_loader_pass(self, loader: Any, iterator: Any) -> None:
        """The program starts a pass over a loader that is not shared."""
        if self._own or threading.get_ident() != self._thread or not _whole(loader):
            return
        where = _calling_line()
        if where:
            self.passes = [one for one in self.passes if one[0]() is not None]
            self.passes.append((weakref.ref(iterator), _samples(loader), where))

    def on_length(self, loader: Any) -> None:
        """The program asks for the length of a loader."""
        share = self._loaders.under_way(loader)
        ours = str(sys._getframe(2).f_globals.get("__name__", "")).startswith(("paceline.", "paceline_plugins."))
        where = "" if ours or share is None or threading.get_ident() != self._thread else _calling_line()
        if share is not None and where:
            self._warn(
                f"length {where}",
                f"{where}: len(..) of the program's own loader counts the batches of all {self._world.size} workers, "
                f"and this pass over run.share(loader) has {share.batches_of_worker():,}, so that a test for the last "
                "one is never true, and a mean is too small: write len(run.share(loader))",
            )

    def on_step(self) -> None:
        """The optimizer made a step: the program trains on the loaders with open passes."""
        if not self.passes:
            return
        for found, samples, where in self.passes:
            iterator = found()
            if iterator is not None and getattr(iterator, "_num_yielded", None):
                many = f" of {samples:,} samples" if samples else ""
                self._warn(
                    where,
                    f"{where}: the program trains on a DataLoader{many} that is not shared, so each of the "
                    f"{self._world.size} workers goes through all of it. Write `for .. in run.share(loader)`; where "
                    "the data are each worker's own (samples made at random, files by rank), say attach(.., "
                    'data="own")',
                )
        self.passes = [one for one in self.passes if one[2] not in self._warned and one[0]() is not None]

    def _on_empty_pass(self) -> None:
        self._warn(
            "empty",
            "a shared loader gave this worker no batch in an epoch: it has no samples, or fewer batches than there are "
            "workers, or is a generator, which can be gone through once; look at its data set and its batch size",
            everywhere=True,
        )

    def numbers(self, values: dict[str, Any], closed: bool) -> dict[str, float]:
        """The values that the program logs, as numbers; others are refused."""
        if closed:
            self._warn("late", "run.log after run.close(): it is not written; log before the run is closed", True)
        found: dict[str, float] = {}
        for name, value in values.items():
            try:
                found[name] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                text = f"run.log({name}=..) takes a number, or a tensor of one element, got {str(value)[:80]!r}"
                raise UnsupportedError(self._world.sign(text)) from error
        return found

    # -- schedulers -------------------------------------------------------------------------------

    def on_scheduler_step(self, scheduler: Any) -> None:
        """A scheduler of this run's optimizer made a step."""
        share = self._loaders.leading
        if share is None:
            return
        made = self._schedulers[scheduler] = self._schedulers.get(scheduler, 0) + 1
        horizon = horizon_of(scheduler)
        if made != 2 or horizon is None or share.measured:
            return
        with contextlib.suppress(TypeError):  # a loader of a stream has no length
            whole, own = len(share.loader), share.batches_of_worker()  # type: ignore[arg-type]
            if whole > own > 0 and horizon[1] % whole == 0:
                epochs = horizon[1] // whole
                says = (
                    f"which is {epochs} x {whole}, the minibatches of the whole loader; a worker makes {own} of them "
                    f"in an epoch. If {epochs} epochs are meant,"
                )
                self._warn_of_schedule(scheduler, horizon, says, own / whole)

    def _warn_of_schedule(self, scheduler: Any, horizon: tuple[str, int], says: str, way: float) -> None:
        self._warn(
            "schedule",
            f"{type(scheduler).__name__} has {horizon[0]}={horizon[1]}, {says} the rate comes only {way:.0%} of the "
            "way: count with len(run.share(loader)), not with len(loader)",
        )

    def close(self) -> None:
        """The run ends."""
        _active.discard(self)
        workers = self._world.size
        for scheduler, made in self._schedulers.items():
            horizon, went = horizon_of(scheduler), scheduler.last_epoch
            if made < 2 or horizon is None:
                continue
            if abs(went * workers - horizon[1]) <= max(workers, TOLERANCE * horizon[1]):
                says = f"and each of {workers} workers made {went} steps:"
                self._warn_of_schedule(scheduler, horizon, says, went / horizon[1])


def horizon_of(scheduler: Any) -> tuple[str, int] | None:
    """The steps after which a scheduler ends, with the name of the setting; None if it has no end."""
    for name in ("T_max", "total_steps", "total_iters"):
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and value > 1:
            return name, value
    milestones = getattr(scheduler, "milestones", None)
    if milestones:
        return "milestones", int(max(milestones))
    for given in getattr(scheduler, "lr_lambdas", ()):
        value = getattr(given, "keywords", {}).get("num_training_steps")
        if isinstance(value, int) and value > 1:
            return "num_training_steps", value
    return None


def _whole(loader: Any) -> bool:
    """Whether a loader reads its whole data set, judged by its samplers."""
    batches, sampler = loader.batch_sampler, loader.sampler
    return type(batches) in (BatchSampler, type(None)) and (
        isinstance(sampler, PLAIN_SAMPLERS)
        or type(sampler).__name__ == "_InfiniteConstantSampler"  # of an iterable data set
    )


def _samples(loader: Any) -> int:
    try:
        return len(loader.dataset)
    except TypeError:
        return 0


def _calling_line() -> str:
    """The program's file and line, as `train.py:31`; "" if paceline itself iterates over the loader."""
    frame, found = sys._getframe(3), ""
    while frame is not None and not found:
        path = frame.f_code.co_filename
        if any(part in path for part in OWN_FILES):
            return ""
        if not in_library(path):
            found = f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return found


@cache
def _patch_loaders_and_schedulers() -> None:
    """Patch loaders and schedulers, once for this process; with one worker nothing is patched."""

    def iterating(iterate: Callable[..., Any]) -> Callable[..., Any]:
        def patched_iter(loader: Any) -> Any:
            iterator = iterate(loader)
            for one in list(_active):
                one.on_loader_pass(loader, iterator)
            return iterator

        return patched_iter

    def counting(length: Callable[..., Any]) -> Callable[..., Any]:
        def patched_length(loader: Any) -> Any:
            for one in list(_active):
                one.on_length(loader)
            return length(loader)

        return patched_length

    def scheduling(step: Callable[..., Any]) -> Callable[..., Any]:
        def patched_step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(scheduler, *args, **kwargs)
            mistakes = getattr(getattr(scheduler.optimizer, MARK, None), "mistakes", None)
            if mistakes is not None:
                mistakes.on_scheduler_step(scheduler)
            return result

        return patched_step

    iterates, counts = (DataLoader, "__iter__", iterating), (DataLoader, "__len__", counting)
    for owner, name, wrap in iterates, counts, (LRScheduler, "step", scheduling):
        setattr(owner, name, wrap(getattr(owner, name)))

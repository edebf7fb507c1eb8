# SPDX-License-Identifier: Apache-2.0
"""`len(loader)` as the program sees it: the batches that this worker gets, if the loader is for training.

Before the first pass its use has to be guessed; a wrong guess is reported. So is an evaluation that stops early, since
its limit may be the length of a part; where it stops as a part of its own loader would, it is refused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.core.world import World
from paceline.data.sharing.loader_registry import LoaderRegistry
from paceline.errors import UnsupportedError
from paceline_plugins.zero.callers import PACKAGE, TORCH, asked_by_paceline, caller
from paceline_plugins.zero.models import GlobalView
from paceline_plugins.zero.passes import LoaderPass, Passes, PassHistory, in_turn
from paceline_plugins.zero.patches import Patches
from paceline_plugins.zero.rank_discovery import ZeroWorker
from paceline_plugins.zero.reporter import Reporter

PROGRESS = "tqdm"
"""A module that only displays lengths."""
MOST_LIMITS = 8
"""So many lengths of parts are remembered, the latest."""
HEAP_TYPE = 1 << 9
"""Flag of a class that can be changed."""


@dataclass
class Answer:
    """What `len(loader)` was for the program."""

    where: str  # the line that asked
    part: bool  # whether it was that of this worker's part
    length: int  # the number


class Lengths:
    """Lengths of the program's loaders.

    Args:
        worker: this worker.
        reporter: prints messages.
        where: gives the current line of the program.
        passes: the open passes.
        history: what loaders were used for.
        view: gives the attached model, or None.
    """

    def __init__(
        self,
        worker: ZeroWorker,
        reporter: Reporter,
        where: Callable[[], str],
        passes: Passes,
        history: PassHistory,
        view: Callable[[], GlobalView | None],
    ) -> None:
        self._worker, self._workers, self._reporter, self._where = worker, worker.size, reporter, where
        self._passes, self._history, self._view = passes, history, view
        self._made: weakref.WeakKeyDictionary[DataLoader[Any], None] = weakref.WeakKeyDictionary()  # in their order
        self._asked: weakref.WeakKeyDictionary[DataLoader[Any], Answer] = weakref.WeakKeyDictionary()
        self._limits: list[Answer] = []  # lengths of parts
        self._as_it_is = False
        self._kinds: set[type] = set()  # whose `__len__` we stand in for
        self._replace: Callable[[Any, str, Callable[[Any], Any]], None] = lambda owner, name, make: None
        self._data = DataLengths(worker.size, reporter, where, self._stand_in)

    def install(self, patches: Patches) -> None:
        """Patch `len(loader)`."""
        self._replace = patches.replace
        self._stand_in(DataLoader, self.of_loader)

    def noticed(self, loader: DataLoader[Any]) -> None:
        """The program constructed a loader, perhaps of a class with its own `__len__`."""
        self._made[loader] = None
        for kind in type(loader).__mro__:
            if issubclass(kind, DataLoader) and "__len__" in vars(kind):
                self._stand_in(kind, self.of_loader)
        if self._workers > 1:
            self._data.noticed(loader)

    def _stand_in(self, kind: type, make: Callable[[Callable[[Any], int]], Callable[[Any], int]]) -> None:
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._replace(kind, "__len__", make)

    def was_asked(self, loader: DataLoader[Any]) -> bool:
        """Whether the program has asked for its length."""
        return loader in self._asked

    def whole(self, loader: DataLoader[Any], kind: type[DataLoader[Any]] | None = None) -> int:
        """All batches of a loader; 0 if unknown. With `kind`, as that class counts them."""
        with self._as_alone():
            try:
                return int((kind or type(loader)).__len__(loader))
            except (TypeError, AttributeError):
                return 0

    @contextlib.contextmanager
    def _as_alone(self) -> Iterator[None]:
        """Context in which lengths are those of one worker."""
        before, self._as_it_is = self._as_it_is, True
        try:
            yield
        finally:
            self._as_it_is = before

    def of_loader(self, original: Callable[[Any], int]) -> Callable[[Any], int]:
        """`__len__` of `DataLoader`, or of a class that is derived from it."""

        def length(loader: DataLoader[Any]) -> int:
            with self._as_alone():
                whole = original(loader)
            if self._as_it_is or asked_by_paceline() or self._workers == 1:
                return whole
            frame, where = caller(), self._where()
            part = self._is_part(loader, where, _by_a_library(frame, where))
            answer = Answer(where, part, self._of_part(loader, whole) if part else whole)
            if not _module(frame).startswith(PROGRESS):
                self._asked.setdefault(loader, answer)
                self._limits = [*self._limits, answer][-MOST_LIMITS:] if part else self._limits
            return answer.length

        return length

    def _of_part(self, loader: DataLoader[Any], whole: int) -> int:
        """The batches of this worker, where one worker has `whole`."""
        about, view = -(-whole // self._workers), self._view()
        if whole != self.whole(loader, DataLoader):  # its class counts something else
            return about
        try:
            if view is not None:
                return view.run.share(loader).batches_of_worker()
            world = World(self._worker.rank, self._workers)
            return LoaderRegistry(world, 0, lambda epoch, batches: None).share(loader).batches_of_worker()
        except UnsupportedError:  # the pass will say so
            return about

    def _is_part(self, loader: DataLoader[Any], where: str, library: bool) -> bool:
        """Whether to return the length of a worker's part."""
        if not torch.is_grad_enabled():  # also while a training pass is open, as when an engine evaluates within it
            return False
        for one in reversed(self._passes.open):
            if one.loader is loader:
                return one.split
        here, view = self._history.at(where, loader), self._view()
        if len(here) == 1:
            return True in here
        training, uses = view is None or view.trains, self._history.uses(loader)
        if library and not here and any(trained for _, trained in uses):
            return False  # an engine other than the one that trained from it
        for known in ({trained for mode, trained in uses if mode is training}, {trained for _, trained in uses}):
            if len(known) == 1:
                return known.pop()
        if uses:
            return self._history.trained_last(loader)
        if not training:
            return False
        return not in_turn(loader) or (all(map(in_turn, self._made)) and loader is next(iter(self._made), None))

    def used(self, one: LoaderPass) -> None:
        """The use of a pass is known: report what an earlier `len` returned if it does not fit."""
        asked, view = self._asked.get(one.loader), self._view()
        if self._workers == 1 or view is None:
            return
        if one.split:
            self._data.split(one.loader)
        if asked is None:
            return
        if asked.part != one.split:
            told, made = ("a worker's part", "all") if asked.part else ("all", "a worker's part")
            self._reporter.say(
                f"{asked.where} asked for the length of the loader of {one.where} and got the batches of {told}; "
                f"a pass has those of {made}: look whether a schedule or a mean was made from it"
            )
            asked.part = one.split
        if one.split and view.run.share(one.loader).leased:
            self._reporter.once(
                "leased",
                f"{asked.where} asked for the length of the loader of {one.where}, and got that of an even split: "
                f"under {view.run.rule.name} a fast worker gets more batches and a slow one fewer, so that a test for "
                "the last batch comes too early or never; take sync or a block rule where that matters",
            )

    def stops_as_a_part(self, one: LoaderPass) -> bool:
        """Whether an evaluation that was left early stopped where a part of its loader would end.

        Where it may have gone by the length of another loader's part, that is reported.
        """
        whole, limits = self.whole(one.loader), self._limits
        if one.steps or one.backward or one.batches < 2 or not limits or one.batches == whole:
            return False
        ends = one.batches, one.batches - 1  # a loop may ask for one more before it stops
        asked = self._asked.get(one.loader)
        if asked in limits and asked is not None and asked.length in ends and asked.length < whole:
            return True
        limit = next((limit for limit in reversed(limits) if limit.length in ends), limits[-1])
        self._reporter.once(
            f"early {one.where}",
            f"{one.where} evaluates {one.batches:,} of {whole or 'its'} batches and stops. {limit.where} got a "
            f"length of {limit.length:,}, which is that of a worker's part; if this evaluation goes by it, it covers "
            f"1/{self._workers} of what one worker would: ask for such a limit inside of torch.no_grad()",
        )
        return False


class DataLengths:
    """Lengths of data sets and samplers, which are those of all data: reported where a worker trains on a part.

    Args:
        workers: N.
        reporter: prints messages.
        where: gives the current line of the program.
        stand_in: replaces the `__len__` of a class.
    """

    def __init__(
        self,
        workers: int,
        reporter: Reporter,
        where: Callable[[], str],
        stand_in: Callable[[type, Callable[[Any], Any]], None],
    ) -> None:
        self._workers, self._reporter, self._where, self._stand_in = workers, reporter, where, stand_in
        self._asked: list[tuple[weakref.ref[Any], str]] = []  # before they were split, and where
        self._split: list[weakref.ref[Any]] = []

    def noticed(self, loader: DataLoader[Any]) -> None:
        """The program constructed a loader."""
        for thing in _sized(loader):
            self._stand_in(type(thing), self._length)

    def split(self, loader: DataLoader[Any]) -> None:
        """A worker trains on its part of a loader."""
        for thing in _sized(loader):
            self._split = [*(one for one in self._split if one() not in (None, thing)), weakref.ref(thing)]
            for one, where in self._asked:
                if one() is thing:
                    self._tell(thing, where)
        self._asked = [one for one in self._asked if one[0]() is not None]

    def _length(self, original: Callable[[Any], int]) -> Callable[[Any], int]:
        def length(thing: Any) -> int:
            frame = caller()
            if not (_is_torch(frame) or _module(frame).startswith(PROGRESS) or frame.f_locals.get("self") is thing):
                if any(one() is thing for one in self._split):
                    self._tell(thing, self._where())
                elif not any(one() is thing for one, _ in self._asked):
                    self._asked.append((weakref.ref(thing), self._where()))
            return original(thing)

        return length

    def _tell(self, thing: Any, where: str) -> None:
        count, what = len(thing), "batches" if hasattr(thing, "batch_size") else "samples"
        self._reporter.once(
            "data",
            f"{where} asks how many training {what} there are ({count:,}); each worker trains on 1/{self._workers} of "
            f"them: a sum of its losses divided by that number is too small (divide by the {what} that it saw, or by "
            "len(loader)), and steps made from it are more than it makes",
        )


def _sized(loader: DataLoader[Any]) -> list[Any]:
    """The data set and the samplers of a loader, as far as they have a length that can be watched."""
    found = (loader.dataset, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    return [thing for thing in found if hasattr(thing, "__len__") and _can_be_watched(thing)]


def _can_be_watched(thing: Any) -> bool:
    return bool(type(thing).__flags__ & HEAP_TYPE and type(thing).__weakrefoffset__)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_torch(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((PACKAGE, TORCH))


def _by_a_library(frame: FrameType, where: str) -> bool:
    """Whether a library that the program calls asks, such as an engine that then runs that many batches."""
    own = frame.f_code.co_filename.endswith("/" + where.partition(":")[0]) or _module(frame) == "__main__"
    return not own and not _is_torch(frame) and not _module(frame).startswith(PROGRESS)

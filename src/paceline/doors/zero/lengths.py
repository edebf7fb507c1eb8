# SPDX-License-Identifier: Apache-2.0
"""`len(loader)` as the program sees it: the batches of a worker's part if the loader is for training.

Before the first pass its use has to be guessed. A wrong guess is reported. An evaluation that stopped after as many
batches as a part has is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.doors.zero.callers import PACKAGE, TORCH, asked_by_paceline, caller
from paceline.doors.zero.passes import LoaderPass, Passes, PassHistory, in_turn
from paceline.doors.zero.patches import Patches
from paceline.doors.zero.reporter import Reporter

PROGRESS = "tqdm"
"""A module that only displays lengths."""


class Lengths:
    """Lengths of the program's loaders and data sets.

    Args:
        workers: N.
        reporter: prints messages.
        where: gives the current line of the program.
        passes: the open passes.
        history: what loaders were used for.
        trains: whether the model is in training mode; true before there is one.
    """

    def __init__(
        self,
        workers: int,
        reporter: Reporter,
        where: Callable[[], str],
        passes: Passes,
        history: PassHistory,
        trains: Callable[[], bool],
    ) -> None:
        self._workers, self._reporter, self._where = workers, reporter, where
        self._passes, self._history, self._trains = passes, history, trains
        self._made: weakref.WeakKeyDictionary[DataLoader[Any], None] = weakref.WeakKeyDictionary()  # in their order
        # loader -> where its length was asked for, whether as a part
        self._asked: weakref.WeakKeyDictionary[DataLoader[Any], tuple[str, bool]] = weakref.WeakKeyDictionary()
        self._patches: Patches | None = None
        self._as_it_is = False
        self._kinds: set[type] = set()  # whose `__len__` we stand in for
        self._split: list[weakref.ref[Any]] = []  # data that are trained on in parts

    def install(self, patches: Patches) -> None:
        """Patch `len(loader)`."""
        self._patches = patches
        patches.replace(DataLoader, "__len__", self.of_loader)

    def noticed(self, loader: DataLoader[Any]) -> None:
        """The program constructed a loader, perhaps of a class with its own `__len__`."""
        self._made[loader] = None
        for kind in type(loader).__mro__:
            if kind is not DataLoader and issubclass(kind, DataLoader) and "__len__" in vars(kind):
                self._stand_in(kind, self.of_loader)

    def was_told_part(self, loader: DataLoader[Any]) -> bool:
        """Whether `len` returned the batches of a part."""
        return self._asked.get(loader, ("", False))[1]

    def was_asked(self, loader: DataLoader[Any]) -> bool:
        """Whether the program has asked for its length."""
        return loader in self._asked

    def whole(self, loader: DataLoader[Any]) -> int:
        """All batches of a loader; 0 if unknown."""
        self._as_it_is = True
        try:
            return len(loader)
        except TypeError:
            return 0
        finally:
            self._as_it_is = False

    def of_loader(self, original: Callable[[Any], int]) -> Callable[[Any], int]:
        """`DataLoader.__len__`."""

        def length(loader: DataLoader[Any]) -> int:
            whole = original(loader)
            if self._as_it_is or asked_by_paceline() or self._workers == 1:
                return whole
            where = self._where()
            part = self._is_part(loader, where, _by_a_library(caller(), where))
            self._asked.setdefault(loader, (where, part))
            return -(-whole // self._workers) if part else whole

        return length

    def _is_part(self, loader: DataLoader[Any], where: str, library: bool) -> bool:
        """Whether to return the length of a worker's part."""
        if not torch.is_grad_enabled():  # also while a training pass is open, as when an engine evaluates within it
            return False
        for one in reversed(self._passes.open):
            if one.loader is loader:
                return one.split
        here = self._history.at(where, loader)
        if len(here) == 1:
            return True in here
        training, uses = self._trains(), self._history.uses(loader)
        if library and not here and any(trained for _, trained in uses):
            return False  # an engine other than the one that trained from it
        for known in ({trained for mode, trained in uses if mode is training}, {trained for _, trained in uses}):
            if len(known) == 1:
                return known.pop()
        if uses or not training:
            return training
        return not in_turn(loader) or (all(map(in_turn, self._made)) and loader is next(iter(self._made), None))

    def used(self, one: LoaderPass) -> None:
        """The use of a pass is known: report it if an earlier `len` returned the wrong kind of length."""
        asked, said_part = self._asked.setdefault(one.loader, (one.where, one.split))
        if said_part != one.split and self._workers > 1:
            told, made = ("a worker's part", "all") if said_part else ("all", "a worker's part")
            self._reporter.say(
                f"{asked} asked for the length of the loader of {one.where} and was told the batches of {told}; a pass "
                f"has those of {made}: look whether a schedule or a mean was made from it"
            )
            self._asked[one.loader] = (asked, one.split)
        if one.split and self._workers > 1:
            self._watch(one.loader.dataset)

    # -- data -------------------------------------------------------------------------------------

    def _watch(self, data: Any) -> None:
        """Watch `len` of a split data set: the caller may divide by it."""
        if isinstance(data, Dataset) and hasattr(data, "__len__"):
            self._split = [*(one for one in self._split if one() not in (None, data)), weakref.ref(data)]
            self._stand_in(type(data), self._of_data)

    def _of_data(self, original: Callable[[Any], int]) -> Callable[[Any], int]:
        def length(data: Any) -> int:
            count = original(data)
            asks = caller().f_code.co_filename
            if not asks.startswith((PACKAGE, TORCH)) and any(one() is data for one in self._split):
                self._reporter.once(
                    "data",
                    f"{self._where()} asks how many training samples there are ({count:,}); each worker trains on 1/"
                    f"{self._workers} of them: a sum of its losses divided by that number is too small (divide by the "
                    "samples that it saw, or by len(loader)), and steps made from it are more than it makes",
                )
            return count

        return length

    def _stand_in(self, kind: type, make: Callable[[Callable[[Any], int]], Callable[[Any], int]]) -> None:
        if kind not in self._kinds and self._patches is not None:
            self._kinds.add(kind)
            self._patches.replace(kind, "__len__", make)


def _by_a_library(frame: FrameType, where: str) -> bool:
    """Whether a library that the program calls asks, such as an engine that then runs that many batches."""
    name = frame.f_code.co_filename
    module = str(frame.f_globals.get("__name__", ""))
    own = name.endswith("/" + where.partition(":")[0]) or module == "__main__"
    return not own and not name.startswith((PACKAGE, TORCH)) and not module.startswith(PROGRESS)

# SPDX-License-Identifier: Apache-2.0
"""Tells training passes over a loader from evaluation: a pass with optimizer steps is training.

When a pass begins, its use is guessed from earlier uses of the same line and loader (:class:`PassHistory`), from the
model's mode and from whether gradients are on. The steps and backward passes in it then decide.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline_plugins.zero.patches import Patches

AT_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(eq=False)
class LoaderPass:
    """One pass over a loader."""

    where: str  # the line that iterates over it
    loader: DataLoader[Any]  # the program's
    training: bool  # whether the model was in training mode when the pass began
    gradients: bool  # whether they were on
    split: bool  # whether this worker gets its part only
    batches: int = 0  # handed out
    steps: int = 0  # optimizer steps in it
    backward: bool = False  # whether there was a backward pass in it
    # whether the first forward pass of the model in it recorded a graph; None if there was none
    graph: bool | None = None
    followed: bool = False  # whether the model was called with gradients after the pass
    over: bool = False  # whether it ended or the program left it
    complete: bool = False  # whether it ended
    full: bool = True  # whether a worker's batches are the loader's batches, not pieces of them
    said: bool | None = None  # whether it was reported as split; None if nothing was reported
    asked: bool = False  # whether the program had asked for the loader's length
    rates: dict[Any, int] = field(default_factory=dict)  # steps of the rate schedules when it began

    @property
    def evaluates(self) -> bool:
        """Whether it looks like an evaluation so far."""
        return self.graph is False and not self.backward and not self.steps

    @property
    def suspicious(self) -> bool:
        """Whether it was split and left without a step, after batches other than a single worker's."""
        if not self.split or self.complete or self.steps:
            return False
        return self.batches > 0 and (not self.full or (self.batches > 1 and not at_random(self.loader)))


class Passes:
    """The open passes, and those whose batches the next step uses."""

    def __init__(self) -> None:
        self.open: list[LoaderPass] = []
        self.left: list[LoaderPass] = []
        """Split passes that are over without a step so far; an error unless one follows."""
        self.unmerged = False
        """Whether a pass with steps was left before its merge."""
        self._since: list[LoaderPass] = []  # handed out a batch since the last step
        self._last: list[LoaderPass] = []  # those of the last step: one batch may serve several steps

    def install(self, patches: Patches) -> None:
        """Patch backward passes, and steps of a GradScaler, which skips the optimizer where gradients overflow."""

        def backward(original: Callable[..., Any]) -> Callable[..., Any]:
            def noticed(*args: Any, **kwargs: Any) -> Any:
                self.backward()
                return original(*args, **kwargs)

            return noticed

        def scaled_step(original: Callable[..., Any]) -> Callable[..., Any]:
            def noticed(*args: Any, **kwargs: Any) -> Any:
                self.stepped()
                return original(*args, **kwargs)

            return noticed

        patches.replace(torch.autograd, "backward", backward)
        patches.replace(torch.amp.GradScaler, "step", scaled_step)

    @property
    def in_training(self) -> int:
        """How many open passes are split."""
        return sum(1 for one in self.open if one.split)

    def handed(self, one: LoaderPass) -> None:
        """A batch goes to the program."""
        one.batches += 1
        if one not in self._since:
            self._since.append(one)

    def forward(self, graph: bool) -> None:
        """The model is called; `graph` says whether gradients are on."""
        for one in self._since:
            if one.graph is None and not one.over:
                one.graph = graph
            one.followed = one.followed or (one.over and graph)

    def backward(self) -> None:
        """A backward pass was made."""
        for one in self._since:
            one.backward = True

    def whole_of_step(self) -> LoaderPass | None:
        """The pass that was not split although a step is being made from it; None if there is none."""
        split = any(one.split for one in self._since)
        for one in reversed(self._since):
            if one.split:
                continue
            if not one.over and (one.gradients or not split):
                return one
            if one.over and one.gradients and not one.followed and not split:
                return one  # its loss was summed, and the backward pass follows it
        return None

    def stepped(self) -> list[LoaderPass]:
        """A step was made; returns the split passes that it used."""
        self._last = [one for one in self._since if one.split] or self._last
        for one in self._last:
            if not (one.over and one.graph is False):  # a pass without gradients is in no step
                one.steps += 1
        self.left = [one for one in self.left if not one.steps]
        self.unmerged = self.unmerged or any(one.complete for one in self._last)
        self._since.clear()
        return self._last

    def new_run(self) -> None:
        """Other optimizers step now: the batches before are none of theirs."""
        self._since, self._last = [], []

    def close(self, one: LoaderPass, complete: bool) -> None:
        """A pass is over, or the program has begun another over the same data."""
        one.over, one.complete = True, complete
        self.open.remove(one)
        self.unmerged = self.unmerged or (one.split and one.steps > 0)


class PassHistory:
    """Earlier uses of lines and loaders.

    A loader that is rebuilt for each epoch is recognized by its dataset; if that is rebuilt, too, by the line.
    """

    def __init__(self) -> None:
        self._numbers = PassNumbers()
        self._seen: dict[tuple[str, tuple[str, int], bool], set[bool]] = {}  # line, key of the loader, mode
        self._of: dict[tuple[str, int], set[tuple[bool, bool]]] = {}  # key of the loader -> (mode, whether trained)
        self._latest: dict[tuple[str, int], bool] = {}  # key of the loader -> whether its last pass trained
        self.trained = False
        """Whether any pass trained."""

    def add(self, one: LoaderPass, trained: bool) -> None:
        """Record a finished pass."""
        self.trained = self.trained or trained
        for thing in self._keys(one.loader):
            self._seen.setdefault((one.where, thing, one.training), set()).add(trained)
            self._of.setdefault(thing, set()).add((one.training, trained))
            self._latest[thing] = trained

    def trains(self, where: str, loader: DataLoader[Any], training: bool) -> bool | None:
        """Whether this pass is for training, judged by earlier ones; None if they do not decide.

        If the line has ever trained from the loader, it is taken to do so again in any mode: a split pass can still be
        completed. Uses of the line alone count in the same mode only.
        """
        *own, line = self._keys(loader)
        for thing in own:
            same, other = (self._seen.get((where, thing, mode), set()) for mode in (training, not training))
            if same or True in other:
                return True in same | other
        found = self._seen.get((where, line, training), set())
        return True in found if len(found) == 1 else None

    def at(self, where: str, loader: DataLoader[Any]) -> set[bool]:
        """Whether earlier passes of this line over this loader, or over its data, trained: a set of bools."""
        for thing in self._keys(loader)[:2]:
            found = self._seen.get((where, thing, True), set()) | self._seen.get((where, thing, False), set())
            if found:
                return found
        return set()

    def uses(self, loader: DataLoader[Any]) -> set[tuple[bool, bool]]:
        """(whether in training mode, whether trained) of the passes over this loader, or another over its data."""
        own, of_data, *_ = self._keys(loader)
        return self._of.get(own) or self._of.get(of_data) or set()

    def trained_last(self, loader: DataLoader[Any]) -> bool:
        """Whether the last pass over this loader, or over its data, trained."""
        return next((self._latest[thing] for thing in self._keys(loader)[:2] if thing in self._latest), False)

    def _keys(self, loader: DataLoader[Any]) -> list[tuple[str, int]]:
        """Keys of a loader, the most specific first."""
        own = self._numbers.of(loader) or 0
        length = len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0
        return [("loader", own), ("data", self._numbers.of(loader.dataset) or -own), ("samples", length), ("any", 0)]


class PassNumbers:
    """Numbers objects without keeping them alive."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Callable[[], Any], int]] = {}
        self._next = 1

    def of(self, thing: Any) -> int | None:
        """The number; None for objects without weak references, such as a list."""
        number = id(thing)
        found = self._found.get(number)
        if found is not None and found[0]() is thing:
            return found[1]
        try:
            reference = weakref.ref(thing, lambda _: self._found.pop(number, None))
        except TypeError:
            return None
        self._found[number] = reference, self._next
        self._next += 1
        return self._next - 1


def in_turn(loader: DataLoader[Any]) -> bool:
    """Whether it reads its samples in sequential order."""
    return isinstance(getattr(loader, "sampler", None), SequentialSampler) and _plain(loader)


def at_random(loader: DataLoader[Any]) -> bool:
    """Whether it reads its samples in random order."""
    return isinstance(getattr(loader, "sampler", None), AT_RANDOM) and _plain(loader)


def _plain(loader: DataLoader[Any]) -> bool:
    return type(getattr(loader, "batch_sampler", None)) in (BatchSampler, type(None))

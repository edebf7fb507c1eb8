# SPDX-License-Identifier: Apache-2.0
"""The program's DataLoaders: a loader used for training gives each worker its part; other loaders are not split.

A pass with optimizer steps ends with a merge, so that evaluation and saving after it use the work of all workers. A
split pass without a step was an evaluation: the worker continues with the other workers' parts if the program then
sees the same as alone; otherwise the pass is refused. A step in a pass that was not split is refused at once.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.data.sharing.loader_registry import SharedLoader
from paceline.errors import PacelineError
from paceline.run.run import Run
from paceline_plugins.zero import refusals
from paceline_plugins.zero.callers import asked_by_paceline
from paceline_plugins.zero.lengths import Lengths
from paceline_plugins.zero.models import GlobalView
from paceline_plugins.zero.passes import LoaderPass, Passes, PassHistory, at_random
from paceline_plugins.zero.patches import Patches
from paceline_plugins.zero.rank_discovery import ZeroWorker
from paceline_plugins.zero.reporter import Reporter
from paceline_plugins.zero.schedules import Schedules
from paceline_plugins.zero.seeds import Streams

PassContext = Callable[[Run, DataLoader[Any], str], AbstractContextManager[Streams | None]]
_END = object()


class Loaders:
    """Splits the program's loaders.

    Args:
        worker: this worker.
        reporter: prints messages.
        where: gives the current line of the program.
        attach: called when a pass begins; attaches if possible, and gives the attached model or None.
        around: makes a context around every training pass from the run, the loader and the line; gives this worker's
            random streams, if it has any.
    """

    def __init__(
        self,
        worker: ZeroWorker,
        reporter: Reporter,
        where: Callable[[], str],
        attach: Callable[[], GlobalView | None],
        around: PassContext = lambda run, loader, where: contextlib.nullcontext(),
    ) -> None:
        self._around = around
        self._workers, self._reporter, self._where, self._attach = worker.size, reporter, where, attach
        self._passes, self._history = Passes(), PassHistory()
        self._view: GlobalView | None = None
        self._streams: Streams | None = None
        self._schedules = Schedules(worker.size, reporter, where, lambda: self.passes > 0)
        self._lengths = Lengths(worker, reporter, where, self._passes, self._history, lambda: self._view)
        self._began = self._merging = False
        self.split = False
        """Whether steps were made from a split pass in this run."""
        self.refused: PacelineError | None = None
        """What a pass was refused for; the program may have caught it."""

    @property
    def passes(self) -> int:
        """How many training passes are open."""
        return self._passes.in_training

    @property
    def under_way(self) -> bool | None:
        """Whether the program trains, up to the end of the merge after its pass; None before the first one."""
        return (self.passes > 0 or self._merging) if self._began else None

    # -- standing in ------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Patch the loaders, and the functions that distinguish training from evaluation."""

        def noticing(original: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(original)
            def noticed(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
                original(loader, *args, **kwargs)
                self._lengths.noticed(loader)

            return noticed

        self._lengths.install(patches)
        self._schedules.install(patches)
        patches.replace(DataLoader, "__iter__", self.iterate)
        patches.replace(DataLoader, "__init__", noticing)
        self._passes.install(patches)

    def iterate(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        """`DataLoader.__iter__`."""

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            if multiprocessing.parent_process() is not None:
                return original(loader)
            if asked_by_paceline():
                if self._streams is not None:
                    self._streams.read_again()
                return original(loader)
            view, where = self._attach(), self._where()
            if self._workers > 1:
                return self._pass(original, loader, where)  # its use is judged at the first batch
            if view is None:
                return original(loader)
            if view.trains and torch.is_grad_enabled():
                return self._alone(loader, view, where)
            self._reporter.say(f"{where}: {_samples(loader)}, for evaluation: all of them, on every worker")
            return original(loader)

        return iterate

    def forward(self) -> None:
        """The model is called."""
        self._passes.forward(torch.is_grad_enabled())

    def step(self, optimizer: str) -> None:
        """An optimizer steps.

        Raises:
            Refusal: in a pass that is not split.
        """
        whole = self._passes.whole_of_step()
        if whole is not None:
            raise refusals.step_in_whole_pass(
                self._where(), optimizer, whole.where, _samples(whole.loader), self._workers, whole.gradients
            )
        for one in self._passes.stepped():
            self.split = True
            if one.over and one.steps == 1:
                self._history.add(one, True)

    def judge(self) -> None:
        """The program continues after a pass, or ends.

        Raises:
            Refusal: this worker got a part of a pass, and no step was made from it.
        """
        for one in self._passes.left:
            refused = refusals.pass_without_step if one.split else refusals.pass_cut_short
            raise refused(one.where, _samples(one.loader), _batches(one))

    def settle(self) -> None:
        """Judge, and merge the steps of a pass that the program left early."""
        self.judge()
        view = self._view
        if self._passes.unmerged and view is not None and not view.loaded_at and sys.exc_info()[0] is None:
            self._merge(view)

    def finish(self) -> None:
        """The program has ended."""
        self._passes.left += [one for one in self._passes.open if not one.split and self._lengths.stops_as_a_part(one)]
        self.judge()
        if self._workers > 1:
            self._schedules.ended()

    def _tell_schedules(self, one: LoaderPass) -> None:
        """A training pass is over; check the schedules if the program never asked for the loader's length."""
        whole = self._lengths.whole(one.loader)
        if whole and not one.asked:
            self._schedules.passed(one.rates, one.steps, whole)

    def new_run(self) -> None:
        """The run has ended, and a new one begins."""
        self.judge()
        self.split = False
        self._passes.new_run()

    # -- a pass -----------------------------------------------------------------------------------

    def _alone(self, loader: DataLoader[Any], view: GlobalView, where: str) -> Iterator[Any]:
        """A training pass of a single worker."""
        one = self._begin(where, loader, view, split=True)
        self._say(one)
        try:
            for batch in view.run.share(loader):
                view.leave()
                yield batch
        finally:
            self._passes.close(one, complete=False)
        self._merge(view)

    def _pass(self, original: Callable[[Any], Iterator[Any]], loader: DataLoader[Any], where: str) -> Iterator[Any]:
        """A pass of one of several workers."""
        try:
            yield from self._judged(original, loader, where)
        except PacelineError as error:
            self.refused = self.refused or error
            raise

    def _judged(self, original: Callable[[Any], Iterator[Any]], loader: DataLoader[Any], where: str) -> Iterator[Any]:
        view = self._view = self._attach()
        if view is None:
            yield from original(loader)
            return
        self._leave(loader, view)
        self.settle()
        one = self._begin(where, loader, view, self._trains(where, loader, view))
        complete = False
        try:
            if one.split:
                yield from self._part(one, view)
            else:
                self._say(one)
                yield from self._noted(one, original(loader))
            complete = True
        finally:
            self._merging = complete and one.split  # before the pass is over, since another thread may look
            self._close(one, complete)
        try:
            if one.split:
                self._ended(one, view)
        finally:
            self._merging = False

    def _trains(self, where: str, loader: DataLoader[Any], view: GlobalView) -> bool:
        """Whether the pass that begins is taken as training."""
        if not torch.is_grad_enabled():
            return False
        known = self._history.trains(where, loader, view.trains)
        if known is not None:
            return known
        if not view.trains:  # unknown: a pass in random order can be completed later
            return at_random(loader) and view.run.share(loader).completes
        new = self._history.trained and not self._history.uses(loader)
        return not new or at_random(loader) or view.run.share(loader).full_batch

    def _begin(self, where: str, loader: DataLoader[Any], view: GlobalView, split: bool) -> LoaderPass:
        one = LoaderPass(where, loader, view.trains, torch.is_grad_enabled(), split)
        one.asked, one.rates = self._lengths.was_asked(loader), self._schedules.begin()
        self._passes.open.append(one)
        self._began = self._began or split
        return one

    def _noted(self, one: LoaderPass, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._passes.handed(one)
            yield batch

    def _part(self, one: LoaderPass, view: GlobalView) -> Iterator[Any]:
        """This worker's part; then the other workers' parts, if the pass turns out to be an evaluation."""
        share, epoch = view.run.share(one.loader), 0
        around = self._around(view.run, one.loader, one.where)
        with around as self._streams, contextlib.closing(share.batches()) as batches:
            for batch in self._read(share, batches):
                epoch, one.full = share.epoch, share.full_batch
                view.leave()
                self._passes.handed(one)
                yield batch
                if one.steps:
                    self._say(one)
                elif one.batches == 1 and one.evaluates and self._can_complete(one, share):
                    break
        if one.batches and not one.steps and not one.backward and self._can_complete(one, share):
            one.split = False
            self._say(one)
            yield from self._noted(one, share.rest(epoch, one.batches))

    def _read(self, share: SharedLoader, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; a stream that every worker reads as a whole makes them with draws alike on all workers."""
        streams = self._streams
        reading = streams.reading(lambda: share.epoch) if streams is not None and share.read_as_a_whole else None
        if streams is None or reading is None:
            yield from batches
            return
        while True:
            with streams.read(reading):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    def _can_complete(self, one: LoaderPass, share: SharedLoader) -> bool:
        """Whether the completed pass equals the pass of a single worker, up to the order of a random sampler."""
        return share.completes and (at_random(one.loader) or (one.full and one.batches == 1))

    def _leave(self, loader: DataLoader[Any], view: GlobalView) -> None:
        """The program has left its passes over the loader's data, of which it may still hold the iterators."""
        for one in list(self._passes.open):
            if one.split and one.loader.dataset is loader.dataset:
                self._close(one, complete=False)
                view.run.share(one.loader).leave()

    def _close(self, one: LoaderPass, complete: bool) -> None:
        """A pass is over; must not raise, since the program may have left it."""
        if one.over:
            return
        self._passes.close(one, complete)
        if one.steps or (not one.split and (complete or one.evaluates)):
            self._history.add(one, one.steps > 0)
        if one.suspicious or (not complete and self._lengths.stops_as_a_part(one)):
            self._passes.left.append(one)

    def _ended(self, one: LoaderPass, view: GlobalView) -> None:
        """This worker has finished its part."""
        if one.steps or not one.batches:
            if not one.batches:  # other workers have batches, and train from them
                self._history.add(one, True)
            self._say(one)
            self._merge(view)
            self._tell_schedules(one)
        elif one.backward:
            self._passes.left.append(one)  # gradients were accumulated, and the step follows
        else:
            raise refusals.pass_without_step(one.where, _samples(one.loader), _batches(one))

    def _merge(self, view: GlobalView) -> None:
        """Merge, once all workers are at the end of their pass."""
        self._merging, self._passes.unmerged = True, False
        try:
            view.merge()
        finally:
            self._merging = False

    def _say(self, one: LoaderPass) -> None:
        """Print once whether the pass is training or evaluation."""
        if one.said == one.split:
            return
        one.said = one.split
        about = (
            f"training: split among {self._workers} workers"
            if one.split
            else "evaluation: all of them, on every worker"
        )
        self._reporter.say(f"{one.where}: {_samples(one.loader)}, for {about}")
        self._lengths.used(one)


def _samples(loader: DataLoader[Any]) -> str:
    try:
        return f"{len(loader.dataset):,} samples"  # type: ignore[arg-type]
    except TypeError:
        return "a stream of samples"


def _batches(one: LoaderPass) -> str:
    return f"{one.batches} batches" if one.batches > 1 else "one batch"

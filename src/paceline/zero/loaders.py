# SPDX-License-Identifier: Apache-2.0
"""The program's DataLoaders: those that are gone through in training give each worker its part, others are whole.

A pass is training where the model is in training mode and gradients are on. A complete pass ends with a merge, so that
what the program evaluates or saves behind it has the work of all workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from paceline.session import Run
from paceline.zero import refusals
from paceline.zero.models import GlobalView
from paceline.zero.words import Words, asked_by_paceline

Around = Callable[[Run, DataLoader[Any], str], AbstractContextManager[None]]


class Loaders:
    """What becomes of the program's loaders.

    Args:
        workers: N.
        words: what is said.
        where: says where in the program something happens.
        comes: called when a loader is gone through; gives the attached model, if it can be by now.
        around: a context around every pass in training over a loader, made from the run, the loader and the place.
    """

    def __init__(
        self,
        workers: int,
        words: Words,
        where: Callable[[], str],
        comes: Callable[[], GlobalView | None],
        around: Around = lambda run, loader, where: contextlib.nullcontext(),
    ) -> None:
        self._around = around
        self._workers, self._words, self._where, self._comes = workers, words, where, comes
        # loader -> where its length was asked for, whether as a part
        self._asked: weakref.WeakKeyDictionary[DataLoader[Any], tuple[str, bool]] = weakref.WeakKeyDictionary()
        self.split = False
        """Whether any loader has been split in this run."""
        self.passes = 0
        """Of training, that are under way."""

    def iterate(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        """`DataLoader.__iter__`."""

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            if asked_by_paceline() or multiprocessing.parent_process() is not None:
                return original(loader)
            view = self._comes()
            if view is None:
                return original(loader)
            where = self._where()
            if not view.trains or not torch.is_grad_enabled():
                self._words.say(f"{where}: {_samples(loader)}, for evaluation: all of them, on every worker")
                self._check_length(loader, where, part=False)
                return original(loader)
            return self._pass(loader, view, where)

        return iterate

    def length(self, original: Callable[[Any], int]) -> Callable[[Any], int]:
        """`DataLoader.__len__`: of a worker's part, where the loader is for training or looks as if it were."""

        def length(loader: DataLoader[Any]) -> int:
            whole = original(loader)
            if asked_by_paceline():
                return whole
            if loader not in self._asked:
                self._asked[loader] = self._where(), isinstance(getattr(loader, "sampler", None), RandomSampler)
            return -(-whole // self._workers) if self._asked[loader][1] else whole

        return length

    def _pass(self, loader: DataLoader[Any], view: GlobalView, where: str) -> Iterator[Any]:
        """This worker's part of a pass."""
        share = view.run.share(loader)
        self.split = True
        self._check_length(loader, where, part=True)
        self._words.say(f"{where}: {_samples(loader)}, for training: split among {self._workers} workers")
        steps, batches = view.steps, 0
        self.passes += 1
        try:
            with self._around(view.run, loader, where):
                for batch in share:
                    view.leave()
                    batches += 1
                    yield batch
        finally:
            self.passes -= 1
        if batches and view.steps == steps and self._workers > 1:
            raise refusals.pass_without_step(where, _samples(loader), f"{batches} batches")
        view.merge()

    def _check_length(self, loader: DataLoader[Any], where: str, part: bool) -> None:
        """A length that was asked for before it was known what the loader is for."""
        asked, said_part = self._asked.setdefault(loader, (where, part))
        if said_part != part and self._workers > 1:
            told, made = ("a worker's part", "all") if said_part else ("all", "a worker's part")
            self._words.say(
                f"{asked} asked for the length of the loader of {where} and was told the batches of {told}; a pass has "
                f"those of {made}: look whether a schedule or a mean was made from it"
            )
            self._asked[loader] = (asked, part)


def _samples(loader: DataLoader[Any]) -> str:
    try:
        return f"{len(loader.dataset):,} samples"  # type: ignore[arg-type]
    except TypeError:
        return "a stream of samples"

# SPDX-License-Identifier: Apache-2.0
"""Attaches the rule to a program that does not import paceline, and checks every step.

Optimizers are recorded when they are constructed. The rule attaches when there is one and the program iterates over a
loader, or calls the model in training: before the first gradient, so that all workers train from one start. A program
that constructs another optimizer and trains with it (the next fold, the next phase) begins a new run.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.errors import PacelineError
from paceline.run.attach import attach
from paceline.run.run import Run
from paceline.run.validation import MARK
from paceline_plugins.zero import module_discovery, refusals
from paceline_plugins.zero.agreement import Agreement
from paceline_plugins.zero.averages import Averages
from paceline_plugins.zero.callers import here
from paceline_plugins.zero.hidden_cluster import HiddenCluster
from paceline_plugins.zero.loaders import Loaders
from paceline_plugins.zero.losses import Losses
from paceline_plugins.zero.models import GlobalView, StateDicts
from paceline_plugins.zero.module_file import asks_for_help
from paceline_plugins.zero.own_samples import OwnSamples
from paceline_plugins.zero.patches import Patches
from paceline_plugins.zero.rank_discovery import ZeroWorker
from paceline_plugins.zero.reporter import Reporter
from paceline_plugins.zero.seeds import Streams

CHANGED = "modified by an inplace operation"
"""In torch's error where a backward pass needs values that are no more."""
BY_HAND = 10
"""After this many backward passes without an optimizer, the program is taken to step by hand."""


class Zero:
    """One worker of an unmodified program.

    Args:
        script: the program.
        worker: this worker.
        reporter: prints messages.
        streams: this worker's random streams; None for a single worker.
    """

    def __init__(self, script: Path, worker: ZeroWorker, reporter: Reporter, streams: Streams | None = None) -> None:
        self._script, self._worker, self._reporter = script, worker, reporter
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()  # in their order
        self._served: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # by this run or one before
        self._fresh = False  # an optimizer was made since the last attachment
        self._copies: set[tuple[object, ...]] = set()  # lines where optimizers train copies of the model, and shapes
        self._steppers: list[str] = []  # of this run, in the order in which they were made
        self._averages, self._losses = Averages(reporter, self._here), Losses()
        self._states = StateDicts(self._averages.used)
        self._refused: PacelineError | None = None
        kept = self._kept_for_the_end
        self._streams = streams
        self._samples = OwnSamples(reporter) if worker.random_data and worker.size > 1 else None
        around = () if streams is None else (Agreement(streams).around,)
        self._loaders = Loaders(worker, reporter, self._here, kept(self._attach_if_waiting), *around)
        self._view: GlobalView | None = None
        self._own = False  # the program attaches by itself
        self._backwards = self._runs = 0

    def _here(self) -> str:
        return here(self._script)

    # -- standing in ------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Hook the optimizers, the modules and the loaders of this process."""
        kept = self._kept_for_the_end
        patches.hook(register_optimizer_step_pre_hook, kept(self._before_step))
        patches.hook(register_module_forward_pre_hook, kept(self._before_forward))
        patches.replace(Optimizer, "__init__", self._record)
        self._loaders.install(patches)
        HiddenCluster(self._here).install(patches)
        self._losses.install(patches)
        patches.replace(torch.autograd, "backward", lambda original: kept(self._backward(original)))
        patches.hook(register_optimizer_step_post_hook, self._after_step)
        if self._worker.size > 1:
            patches.replace(nn.Module, "state_dict", self._states.state_dict)
            patches.replace(nn.Module, "load_state_dict", self._states.load_state_dict)
            patches.replace(torch, "save", self._saving)

    def _kept_for_the_end(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; what it refuses is raised once more at the end, in case that the program catches it."""

        @functools.wraps(function)
        def kept(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except PacelineError as error:
                self._refused = self._refused or error
                raise

        return kept

    def _record(self, original: Any) -> Any:
        """`Optimizer.__init__`."""

        def noticed(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._optimizers[optimizer] = None
            self._fresh = True

        return noticed

    def _backward(self, original: Any) -> Any:
        """`torch.autograd.backward`: a program that computes gradients and has no optimizer steps by hand."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            bare = not self._optimizers and self._view is None and not self._own and self._worker.size > 1
            if bare and not multiprocessing.parent_process():
                self._backwards += 1
                if self._backwards == BY_HAND:
                    raise refusals.by_hand(self._here(), self._worker.size)
            if self._view is not None and args:
                self._losses.backward(args[0])
            try:
                return original(*args, **kwargs)
            except RuntimeError as error:
                if self._view is not None and len(self._steppers) > 1 and CHANGED in str(error):
                    raise refusals.across_a_step(self._here(), self._steppers) from error
                raise

        return backward

    def _saving(self, original: Any) -> Any:
        """`torch.save`: a model, or parts of it, with the global parameters."""

        def save(*args: Any, **kwargs: Any) -> Any:
            if self._view is None:
                return original(*args, **kwargs)
            with self._view.shown():
                return original(*args, **kwargs)

        return save

    # -- attaching --------------------------------------------------------------------------------

    def _attach_if_waiting(self) -> GlobalView | None:
        """Called where training may begin: attach if an optimizer is waiting."""
        if not self._fresh or self._own or (self._view is not None and self._loaders.passes):
            return self._view
        waiting = [one for one in self._optimizers if one not in self._served and module_discovery.trained(one)]
        if self._view is None:
            self._own = any(getattr(one, MARK, None) is not None for one in waiting)
            if waiting and not self._own:
                self._attach(waiting, module_discovery.modules(waiting))
        elif waiting and torch.is_grad_enabled():
            roots = module_discovery.modules(waiting)
            if any(root.training for root in roots):
                self._loaders.new_run()
                self._end_run()
                self._attach(waiting, roots)
        return self._view

    def _attach(self, optimizers: list[Optimizer], roots: list[nn.Module]) -> None:
        if self._view is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            raise refusals.distributed(self._here())
        if self._streams is not None:
            self._streams.part()
        with torch.inference_mode(False):  # the program may evaluate first; kept tensors must be usable in training
            chosen = optimizers[0] if len(optimizers) == 1 else optimizers
            place = self._checkpoint_place()
            run = attach(roots[0] if len(roots) == 1 else roots, chosen, data="split", checkpoint=place)
        view = GlobalView(run, roots, self._here, self._reporter)
        view.catch_up, view.under_way = self._loaders.settle, lambda: self._loaders.under_way
        self._view = self._states.view = view  # another thread may read the model
        self._served.update(optimizers)
        self._fresh = False
        numbers = sum(p.numel() for one in optimizers for p in module_discovery.trained(one))
        workers = f"{run.world.size} workers" if run.world.size > 1 else "one worker"
        names = ", ".join(module_discovery.name(root) for root in roots)
        self._steppers = steppers = [type(one).__name__ for one in optimizers]
        whose = f"its {steppers[0]}" if len(steppers) == 1 else f"{', '.join(steppers)}; the last closes a minibatch"
        self._reporter.say(f"{workers} under {run.rule.text()}: {names} ({numbers:,} trained numbers) and {whose}")

    def _checkpoint_place(self) -> str | None:
        """Of this run's checkpoint steps: a folder of its own for each run after the program's first."""
        place = os.environ.get("PACELINE_CHECKPOINT")
        self._runs += 1
        return place if not place or self._runs == 1 else f"{place.rstrip('/')}/run-{self._runs}"

    # -- what the program does --------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._streams is not None and self._streams.waits and self._optimizers:
            trained = {id(p) for one in self._optimizers for p in module_discovery.trained(one)}
            if any(id(p) in trained for p in module.parameters()):
                self._streams.part()
        if self._fresh and module.training and torch.is_grad_enabled():
            self._attach_if_waiting()
        if self._view is not None and self._view.has(module):
            if not torch.is_grad_enabled() and self._view.beside_training:
                return
            if self._samples is not None:
                self._samples.called(module, self._view.roots, args)
            self._loaders.forward()
            if not torch.is_grad_enabled() and not self._view.trains:
                self._loaders.judge()
            self._view.before_forward(module)
        elif self._view is not None and not torch.is_grad_enabled() and not module.training:
            self._averages.used(self._view, module)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._own or optimizer not in self._optimizers:
            return
        view = self._view or (self._attach_if_waiting() if module_discovery.trained(optimizer) else None)
        if view is None:
            return
        if getattr(optimizer, MARK, None) is not view.run:
            if module_discovery.trained(optimizer) and not self._trains_copy(optimizer, view):
                refused = refusals.earlier_optimizer if optimizer in self._served else refusals.later_optimizer
                raise refused(self._here(), type(optimizer).__name__)
            return
        view.leave()
        if self._worker.size == 1:
            return
        if not self._worker.random_data:
            self._loaders.step(type(optimizer).__name__)
        if not self._loaders.split and not self._worker.random_data:
            raise refusals.no_loader(self._here(), type(optimizer).__name__, self._worker.size)
        if view.loaded_at and view.run.rule.schedule.remembers_start:
            raise refusals.other_weights(view.loaded_at)
        if self._samples is not None:
            self._samples.stepped(view.run, self._here())
        view.loaded_at = ""

    def _trains_copy(self, optimizer: Optimizer, view: GlobalView) -> bool:
        """Whether it was made within a pass for a copy of the model, as in an inner loop: each worker's own."""
        if optimizer in self._served or not self._loaders.passes:
            return False
        where, shapes = self._here(), tuple(p.shape for p in module_discovery.trained(optimizer))
        if (where, shapes) not in self._copies:
            copy = module_discovery.copied(optimizer, view.roots)
            if not copy:
                return False
            self._copies.add((where, shapes))
            self._reporter.say(
                f"{where}: {type(optimizer).__name__} trains a copy of {copy} that was made within a pass: each worker "
                "trains its own, and they share what the program puts into the model"
            )
        self._optimizers.pop(optimizer)
        return True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._view is not None and getattr(optimizer, MARK, None) is self._view.run:
            self._losses.stepped(self._view.run)
            if self._worker.size > 1:
                self._view.stepped()
                self._averages.stepped(self._view)

    # -- the end ----------------------------------------------------------------------------------

    @property
    def run(self) -> Run | None:
        """The attached run, or None."""
        return self._view.run if self._view is not None else None

    def finish(self) -> None:
        """The program has ended: end the run together with all workers."""
        if refused := self._refused or self._loaders.refused:
            self._reporter.say("the program caught this refusal and went on:")
            raise refused
        if self._view is not None:
            self._loaders.finish()
            self._end_run()
        elif not self._own:
            if self._worker.size > 1 and not asks_for_help(sys.argv):
                raise refusals.nothing_attached(self._script.name, self._worker.size)
            self._reporter.say("no optimizer of torch trained anything")

    def _end_run(self) -> None:
        assert self._view is not None
        if self._samples is not None:
            self._samples.finish(self._view.run, self._here())
        self._losses.log(self._view.run)
        self._view.close()

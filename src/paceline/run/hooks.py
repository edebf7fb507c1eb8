# SPDX-License-Identifier: Apache-2.0
"""The hooks of `optimizer.step()`, and a watch for parameters that the program changes besides its optimizer (clamps,
masks, rounds, copies, resets, loads), where the rule does not keep the change.

Sums of the parameters are compared over times in which only the program can have changed them:

- after an exchange has written them: the merged model does not keep what the program changes then. A change that the
  mean keeps (a box, a common mask without block momentum) is not seen, rightly.
- after a pass over the data, and before the first one, where layers are reset and parts are loaded.

Where all workers step with the same gradients, each makes the same change; those rules are not watched.

`Mistakes` warns of a loader that is not shared or empty, a scheduler that counts minibatches of all workers, and too
few blocks. Only rank 0 warns of mistakes that concern all workers.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from paceline.checkpoint import AutoCheckpointer
from paceline.communication.diagnosis import in_library
from paceline.core.flat import Fragment, flat_view, fragments
from paceline.core.world import World
from paceline.data.sharing.loader_registry import LoaderRegistry
from paceline.errors import UnsupportedError
from paceline.run.validation import MARK
from paceline.update.engine.context import RunContext
from paceline.update.engine.protocol import EngineProtocol
from paceline.update.monitor import is_sampled, skipped, warn_of_steps

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
        self._asked: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()  # after how many equal steps
        if world.size > 1:
            _patch(schedulers=True)
        if world.size > 1 and data != "split":
            _active.add(self)
            _patch(schedulers=False)

    def warn(self, key: str, text: str, everywhere: bool = False) -> None:
        if text and key not in self._warned and (everywhere or self._world.rank == 0):
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
            self.warn(
                f"length {where}",
                f"{where}: len(..) of the program's own loader counts the batches of all {self._world.size} workers, "
                f"and this pass over run.share(loader) has {share.batches_of_worker():,}, so that a test for the last "
                "one is never true, and a mean is too small: write len(run.share(loader))",
            )

    def on_step(self) -> None:
        """The optimizer made a step: the program trains on the loaders with open passes."""
        for found, samples, where in self.passes:
            iterator = found()
            if iterator is not None and getattr(iterator, "_num_yielded", None):
                many = f" of {samples:,} samples" if samples else ""
                self.warn(
                    where,
                    f"{where}: the program trains on a DataLoader{many} that is not shared, so each of the "
                    f"{self._world.size} workers goes through all of it. Write `for .. in run.share(loader)`; where "
                    "the data are each worker's own (samples made at random, files by rank), say attach(.., "
                    'data="own")',
                )
        self.passes = [one for one in self.passes if one[2] not in self._warned and one[0]() is not None]

    def on_empty_pass(self) -> None:
        self.warn(
            "empty",
            "a shared loader gave this worker no batch in an epoch: it has no samples, or fewer batches than there are "
            "workers, or is a generator, which can be gone through once; look at its data set and its batch size",
            everywhere=True,
        )

    def numbers(self, values: dict[str, Any], closed: bool) -> dict[str, float]:
        """The values that the program logs, as numbers; others are refused."""
        if closed:
            self.warn("late", "run.log after run.close(): it is not written; log before the run is closed", True)
        found: dict[str, float] = {}
        for name, value in values.items():
            try:
                found[name] = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, RuntimeError) as error:
                text = f"run.log({name}=..) takes a number, or a tensor of one element, got {str(value)[:80]!r}"
                raise UnsupportedError(self._world.sign(text)) from error
        return found

    # -- schedulers -------------------------------------------------------------------------------

    def steps_of(self, scheduler: Any) -> int:
        """The steps for which one that the program makes stands: in a pass of unequal shares those of an equal one."""
        horizon = horizon_of(scheduler)
        if self._loaders.leading is None or not self._loaders.dealt:
            return 1
        now = self._loaders.equal_steps + 1e-6
        before = self._asked.get(scheduler, now - self._loaders.equal_step)
        self._asked[scheduler], due = now, int(now) - int(before)
        return due if horizon is None else max(0, min(due, horizon[1] - scheduler.last_epoch))

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
        self.warn(
            "schedule",
            f"{type(scheduler).__name__} has {horizon[0]}={horizon[1]}, {says} the rate comes only {way:.0%} of the "
            "way: count with len(run.share(loader)), not with len(loader)",
        )

    def close(self) -> None:
        """The run ends."""
        _active.discard(self)
        workers = self._world.size
        for scheduler, made in self._schedulers.items() if workers > 1 else ():
            horizon, went = horizon_of(scheduler), scheduler.last_epoch
            if made < 2 or horizon is None:
                continue
            if abs(went * workers - horizon[1]) <= max(workers, TOLERANCE * horizon[1]):
                says = f"and each of {workers} workers made {went} steps:"
                self._warn_of_schedule(scheduler, horizon, says, went / horizon[1])


def horizon_of(scheduler: Any) -> tuple[str, int] | None:
    """The steps after which a scheduler ends, with the name of the setting; None if it has no end."""
    ends = [(name, getattr(scheduler, name, None)) for name in ("T_max", "total_steps", "total_iters")]
    ends.append(("milestones", max(getattr(scheduler, "milestones", None) or [0])))
    keywords = [getattr(given, "keywords", {}) for given in getattr(scheduler, "lr_lambdas", ())]
    ends += [("num_training_steps", given.get("num_training_steps")) for given in keywords]
    return next(((name, value) for name, value in ends if isinstance(value, int) and value > 1), None)


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
def _patch(schedulers: bool) -> None:
    """Patch `schedulers`, or loaders, once for this process; with one worker nothing is patched."""

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
            mistakes = getattr(getattr(scheduler.optimizer, MARK, None), "mistakes", None)
            for _ in range(mistakes.steps_of(scheduler) if mistakes is not None else 1):
                step(scheduler, *args, **kwargs)
            if mistakes is not None and mistakes in _active:
                mistakes.on_scheduler_step(scheduler)

        return patched_step

    iterates, counts = (DataLoader, "__iter__", iterating), (DataLoader, "__len__", counting)
    for owner, name, wrap in [(LRScheduler, "step", scheduling)] if schedulers else [iterates, counts]:
        setattr(owner, name, wrap(getattr(owner, name)))


class StepHooks:
    """The hooks of a run on its optimizers; `engine` is None with one worker."""

    def __init__(
        self,
        context: RunContext,
        engine: EngineProtocol | None,
        mistakes: Mistakes,
        checkpointer: AutoCheckpointer | None,
    ) -> None:
        self._context, self._engine, self._mistakes, self._checkpointer = context, engine, mistakes, checkpointer
        self._progress, self._loaders = context.progress, context.loaders
        self._monitor, self._tuner = context.monitor, context.tuner
        self._optimizers = [optimizer for optimizer, _ in context.owned]
        self._last = self._optimizers[-1]
        self._handles: list[Any] = []
        self._removed = False
        self._changes = ProgramChanges(context, engine) if engine is not None else None

    def install(self, run: Any) -> None:
        """Hook the steps of the optimizers, and mark them as attached to `run`."""
        for optimizer in self._optimizers:
            setattr(optimizer, MARK, run)
            if self._engine is not None:
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def pass_over(self) -> None:
        """A pass with steps of the optimizer is over, or the run has the state with which the program is to begin."""
        if self._changes is not None:
            self._changes.passed()

    def finish(self) -> None:
        """The run ends in order."""
        if self._changes is not None:
            self._changes.tell()
        world = self._context.transport.world
        if world.size > 1:
            text = (
                "the program trains on after run.close(): each worker alone, nothing is exchanged; close the run last"
            )
            warn_of_steps(self._optimizers, MARK, world.sign(text))

    def made_elsewhere(self, optimizer: Optimizer) -> None:
        """The program made a step of `optimizer` itself: what `optimizer.step()` would call, without torch's wrapper
        around it, which records for a profiler and takes as long as all else. It cannot be told from other changes."""
        self._changes = None
        self._before_step(optimizer, (), {})
        self._after_step(optimizer, (), {})

    def remove(self) -> None:
        """Remove the hooks."""
        self._removed = True
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            setattr(optimizer, MARK, None)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._changes is not None:
            self._changes.look()
        if self._engine is None or not self._engine.gradients_due:
            return
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is not None and self._tuner.measured.probing:
            self._tuner.measured.end_probe("step(closure) computes gradients inside the step")
        elif closure is not None:
            text = f"{type(optimizer).__name__}.step(closure) computes gradients inside the step, where"
            more = "cannot exchange them; call backward() before step(), or use a rule that exchanges blocks"
            raise UnsupportedError(self._context.transport.world.sign(f"{text} {self._tuner.rule.text()} {more}"))
        self._engine.before_step(optimizer)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._removed:
            return
        if self._mistakes.passes:
            self._mistakes.on_step()
        engine, progress = self._engine, self._progress
        if engine is not None:
            engine.after_step(optimizer)
            if not engine.gradients_due:  # else it has looked before the step
                progress.check_unchanged(optimizer)
        if optimizer is not self._last or skipped(optimizer):
            return
        warm = progress.stepped()
        new_samples = self._loaders.stepped(progress.steps)
        self._monitor.stepped(progress.steps, self._loaders.samples, new_samples)
        if engine is not None:
            engine.on_step(warm)
        if self._changes is not None:
            self._changes.stepped()
        self._loaders.entered(engine.steps_committed if engine is not None else progress.steps)
        self._tuner.look()
        if self._checkpointer is not None:
            keeps = engine is None or engine.keeps_steps
            (self._checkpointer.stepped if keeps else self._checkpointer.follow)()
        for observer in self._context.observers:
            observer.stepped()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes exchange no gradients."""
        if self._engine is None:
            yield
            return
        before = self._engine.local
        self._engine.keep_local(True)
        try:
            yield
        finally:
            self._engine.keep_local(before)


ROUNDING = 1e-6
"""A change of a sum that is no change of the program's, relative to the norm times the root of the elements."""


class ProgramChanges:
    """One worker's watch over its parameters."""

    def __init__(self, context: RunContext, engine: EngineProtocol) -> None:
        self._context, self._engine = context, engine
        self._everything = fragments("parameters", [pair for _, named in context.owned for pair in named])
        self._held: list[tuple[Fragment, Tensor]] = []
        self._found: list[tuple[list[str], Tensor]] = []
        self._at = (-1, -1)
        self._named: set[str] = set()

    def stepped(self) -> None:
        """A step is over, with its exchange if there was one."""
        written = self._engine.take_written()
        if not written:
            return
        at = self._engine.exchanged, self._context.progress.steps
        if self._found and not self._context.tuner.rule.schedule.overlap:  # else this is within a block
            self.tell()
        if is_sampled(at[0]):
            self._hold(written, at)

    def passed(self) -> None:
        """A pass over the data is over, or the first one is to come."""
        if not self._engine.gradients_due:
            self._hold(self._everything, (self._engine.exchanged, self._context.progress.steps))

    def _hold(self, parts: Iterable[Fragment], at: tuple[int, int]) -> None:
        self._at, self._held = at, [(part, sums(part)) for part in parts]

    def look(self) -> None:
        """An optimizer is about to step; what is found stays on the device, for which nothing waits within a block."""
        held, self._held = self._held, []
        # else a merge or a restored state came between
        if held and self._at == (self._engine.exchanged, self._context.progress.steps):
            with contextlib.suppress(UnsupportedError):  # the exchange refuses a model that has changed its shape
                self._found += [(part.names, changed(part, before)) for part, before in held]

    def tell(self) -> None:
        """Name what was found and not named yet."""
        found, self._found = self._found, []
        names = [name for part, apart in found for name, one in zip(part, apart.tolist(), strict=True) if one]
        new = [name for name in dict.fromkeys(names) if name not in self._named]
        self._named.update(new)
        world = self._context.transport.world
        if new and world.rank == 0:
            text = (
                f"{', '.join(new)}: the program changes these parameters besides its optimizer (a clamp, a mask, a "
                f"part that is loaded), and {self._context.rule.text()} does not keep the change in the model that it "
                "merges. Make it again in the model that you save, or use sync"
            )
            logger.warning("%s", world.sign(text))


def _of_each(part: Fragment, of: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor:
    """What `of` gives for each tensor and float32 or its wider dtype, shape (n,), on its device."""
    part.refresh()
    views = (flat_view(name, tensor) for name, tensor in zip(part.names, part.tensors, strict=True))
    return torch.stack([of(view, torch.promote_types(view.dtype, torch.float32)) for view in views])


@torch.no_grad()
def sums(part: Fragment) -> Tensor:
    """The sum of each tensor, shape (n,), on its device; its rounding is the same each time."""
    return _of_each(part, lambda values, exact: values.sum(dtype=exact))


@torch.no_grad()
def changed(part: Fragment, before: Tensor) -> Tensor:
    """Which tensors have other sums than before, shape (n,), on their device."""
    now = sums(part)
    if now.device.type == "cpu" and torch.equal(now, before):  # elsewhere one would wait for the device
        return torch.zeros(len(now), dtype=torch.bool)
    norms = _of_each(part, lambda values, exact: torch.linalg.vector_norm(values, dtype=exact) * values.numel() ** 0.5)
    return (now - before).abs() > ROUNDING * norms

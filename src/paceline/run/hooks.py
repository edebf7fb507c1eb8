# SPDX-License-Identifier: Apache-2.0
"""The hooks of `optimizer.step()`, and a watch for parameters that the program changes besides its optimizer, where the
rule does not keep the change.

Such programs clamp, project, mask or round weights after each step, copy them, reset a layer or load a part.
Between two steps nobody else writes, so sums of the parameters are compared over that time where it tells something:

- after an exchange has written them: the program changes what the exchange left, so the merged model does not keep what
  the program wants. A change that the mean keeps (a box, a common mask without block momentum) is not seen, rightly.
- after a pass over the data, and before the first one, where layers are reset and parts are loaded.

Where all workers step with the same gradients, each makes the same change; those rules are not watched.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint import AutoCheckpointer
from paceline.core.flat import Fragment, flat_view, fragments
from paceline.errors import UnsupportedError
from paceline.run.mistakes import Mistakes
from paceline.run.validation import MARK
from paceline.update.engine.context import RunContext
from paceline.update.engine.protocol import EngineProtocol
from paceline.update.monitor import is_sampled, skipped


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
        if self._changes is not None:
            self._loaders.after_passes(self._changes.passed)

    def install(self, run: Any) -> None:
        """Hook the steps of the optimizers, and mark them as attached to `run`."""
        for optimizer in self._optimizers:
            setattr(optimizer, MARK, run)
            if self._engine is not None:
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def begin(self) -> None:
        """The run has its state, with which the program is to begin."""
        if self._changes is not None:
            self._changes.passed()

    def finish(self) -> None:
        """The run ends in order."""
        if self._changes is not None:
            self._changes.tell()

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
            self._tuner.end_probe("step(closure) computes gradients inside the step")
        elif closure is not None:
            raise UnsupportedError(
                self._context.transport.world.sign(
                    f"{type(optimizer).__name__}.step(closure) computes gradients inside the step, where "
                    f"{self._tuner.rule.text()} cannot exchange them; call backward() before step(), or use a "
                    "rule that exchanges blocks"
                )
            )
        self._engine.before_step(optimizer)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._removed:
            return
        if self._mistakes.passes:
            self._mistakes.on_step()
        engine, progress = self._engine, self._progress
        if engine is not None:
            if not engine.gradients_due:  # else it has looked before the step
                progress.check_unchanged(optimizer)
            engine.after_step(optimizer)
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


logger = logging.getLogger("paceline")
ROUNDING = 1e-6
"""A change of a sum relative to the sum of magnitudes that is no change of the program's."""


class ProgramChanges:
    """One worker's watch over its parameters."""

    def __init__(self, context: RunContext, engine: EngineProtocol) -> None:
        self._context, self._engine = context, engine
        self._everything = fragments("parameters", [pair for _, named in context.owned for pair in named])
        self._held: list[tuple[Fragment, Tensor]] = []
        self._found: list[tuple[list[str], Tensor]] = []
        self._at = (-1, -1)
        self._named: set[str] = set()

    @property
    def _now(self) -> tuple[int, int]:
        return self._engine.exchanged, self._context.progress.steps

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
            self._hold(self._everything, self._now)

    def _hold(self, parts: Iterable[Fragment], at: tuple[int, int]) -> None:
        self._at, self._held = at, [(part, sums(part)) for part in parts]

    def look(self) -> None:
        """An optimizer is about to step; what is found stays on the device, for which nothing waits within a block."""
        held, self._held = self._held, []
        if held and self._at == self._now:  # else a merge or a restored state came between
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
            logger.warning("%s", world.sign(f"{', '.join(new)}: {CHANGED.format(self._context.rule.text())}"))


CHANGED = (
    "the program changes these parameters besides its optimizer (a clamp, a mask, rounding, a layer begun anew, a part "
    "that is loaded), and {} does not keep the change in the model that it merges. Make it once more in the model that "
    "you save, or use sync"
)


@torch.no_grad()
def sums(part: Fragment) -> Tensor:
    """The sum and the sum of magnitudes of each tensor, shape (n, 2), on its device."""
    part.refresh()
    rows = []
    for name, tensor in zip(part.names, part.tensors, strict=True):
        values = flat_view(name, tensor)
        magnitude = torch.linalg.vector_norm(values, 1, dtype=torch.float64)
        rows.append(torch.stack([values.sum(dtype=torch.float64), magnitude]))
    return torch.stack(rows)


def changed(part: Fragment, before: Tensor) -> Tensor:
    """Which tensors have other sums than before, shape (n,), on their device."""
    return ((sums(part) - before).abs() > ROUNDING * before[:, 1:]).any(1)

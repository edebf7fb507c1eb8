# SPDX-License-Identifier: Apache-2.0
"""The hooks of `optimizer.step()`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from paceline.checkpoint import AutoCheckpointer
from paceline.errors import UnsupportedError
from paceline.run.changes import ProgramChanges
from paceline.run.mistakes import Mistakes
from paceline.run.validation import MARK
from paceline.update.engine import agreement
from paceline.update.engine.context import RunContext
from paceline.update.engine.grad_scaler import skipped
from paceline.update.engine.protocol import EngineProtocol


class StepHooks:
    """The hooks of a run on its optimizers.

    Args:
        context: what the parts of the run share.
        engine: exchanges by the rule; None with one worker.
        mistakes: warns of common mistakes of the program.
        checkpointer: keeps the run's steps, or None.
    """

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
            self._loaders.passed = self._changes.passed

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
        self._mistakes.on_step()
        engine, progress = self._engine, self._progress
        if engine is not None:
            if not engine.gradients_due:  # else it has looked before the step
                agreement.check_unchanged(self._context.owned, optimizer)
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

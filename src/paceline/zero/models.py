# SPDX-License-Identifier: Apache-2.0
"""The model as the program is to see it: a worker's own in training, the global one in evaluation and in what is saved.

Evaluation is a forward pass without gradients while the model is in evaluation mode. The global parameters come in with
the first such pass, and the worker's own come back before anything trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from paceline.session import Run
from paceline.zero.words import asked_by_paceline


class GlobalView:
    """Swaps the global parameters in and out.

    Args:
        run: the run.
        roots: its modules.
    """

    def __init__(self, run: Run, roots: list[nn.Module]) -> None:
        self.run, self.roots = run, roots
        self._members = {id(module) for root in roots for module in root.modules()}
        self._inside: contextlib.ExitStack | None = None
        self.steps = 0
        """Of any of the optimizers."""
        self.loaded_at = ""
        """Where the program put weights of its own into the model, since the last step."""

    def has(self, module: nn.Module) -> bool:
        """Whether it is a part of what is trained."""
        return id(module) in self._members

    @property
    def trains(self) -> bool:
        """Whether the model is in training mode."""
        return any(root.training for root in self.roots)

    def before_forward(self, module: nn.Module) -> None:
        """A module of the model is called."""
        if torch.is_grad_enabled():
            self.leave()
        elif not self.trains:
            self.enter()

    def enter(self) -> None:
        """The global parameters, where the program did not load others."""
        if self._inside is None and not self.loaded_at:
            self._inside = contextlib.ExitStack()
            with torch.inference_mode(False):  # what is kept has to serve training later
                self._inside.enter_context(self.run.global_model())

    def leave(self) -> None:
        """The worker's own parameters."""
        if self._inside is not None:
            inside, self._inside = self._inside, None
            with torch.inference_mode(False):
                inside.close()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the global parameters; afterwards as before."""
        was = self._inside is not None
        self.enter()
        try:
            yield
        finally:
            if not was:
                self.leave()


class StateDicts:
    """`state_dict` and `load_state_dict` of the modules that are trained.

    A state dictionary is a copy of the global parameters. What is loaded is the program's own, and stays until the next
    step.

    Args:
        where: says where in the program something happens.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self.view: GlobalView | None = None
        self._where, self._depth = where, 0

    def state_dict(self, original: Any) -> Any:
        """`nn.Module.state_dict`."""

        def state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._concerns(module) or asked_by_paceline():
                return original(module, *args, **kwargs)
            assert self.view is not None
            self._depth += 1
            try:
                with self.view.shown():
                    found = original(module, *args, **kwargs)
                    for name, value in found.items():
                        found[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
            finally:
                self._depth -= 1
            return found

        return state_dict

    def load_state_dict(self, original: Any) -> Any:
        """`nn.Module.load_state_dict`."""

        def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._concerns(module) and not asked_by_paceline():
                assert self.view is not None
                self.view.leave()
                self.view.loaded_at = self._where()
            return original(module, *args, **kwargs)

        return load_state_dict

    def _concerns(self, module: nn.Module) -> bool:
        return self.view is not None and not self._depth and self.view.has(module)

# SPDX-License-Identifier: Apache-2.0
"""The model as the program sees it: the worker's own in training, the global one in evaluation and when saved.

Evaluation is a forward pass without gradients while the model is in evaluation mode. The global parameters are swapped
in after a training pass, at the first evaluation, or when the program asks for a state dictionary. The worker's own
are swapped back before it trains. Values that the program writes in between are kept. Another thread that reads the
model while it is trained swaps nothing: it would exchange the parameters under the training thread's hands.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.flat import local
from paceline.run.run import Run
from paceline_plugins.zero import module_discovery, refusals
from paceline_plugins.zero.callers import asked_by_paceline
from paceline_plugins.zero.reporter import Reporter

FIRST = 8
"""Values of a tensor that are compared one by one."""
MARKS = 3
"""How many parameters are sampled after every step."""


class GlobalView:
    """Swaps the global parameters in and out, and detects writes of the program into the model meanwhile.

    Args:
        run: the run.
        roots: its modules.
        where: gives the current line of the program.
        reporter: prints messages.
    """

    def __init__(self, run: Run, roots: list[nn.Module], where: Callable[[], str], reporter: Reporter) -> None:
        self.run, self.roots = run, roots
        self._where, self._reporter = where, reporter
        self._members = {id(module) for root in roots for module in root.modules()}
        self._inside: contextlib.ExitStack | None = None
        self._entered: list[Tensor] = []  # the model's sums and first values then
        self._writes = WriteDetector(self)
        self._in_step = False  # the loss was computed, and the step is pending
        self._has_stepped = False
        self.catch_up: Callable[[], None] = lambda: None
        """Called before the global parameters are swapped in."""
        self.under_way: Callable[[], bool | None] = lambda: None
        """Whether the program trains, or merges what it has trained; None before its first pass."""
        self._trainer = threading.current_thread()  # which is about to train
        self.loaded_at = ""
        """The line where the program loaded weights into the model since the last step."""
        self._replaced: tuple[list[Tensor], list[Tensor]] = [], []  # digests of the global parameters; the worker's own

    def has(self, module: nn.Module) -> bool:
        """Whether it is part of the trained model."""
        return id(module) in self._members

    @property
    def trains(self) -> bool:
        """Whether the model is in training mode."""
        return any(root.training for root in self.roots)

    @property
    def beside_training(self) -> bool:
        """Whether another thread than the caller's trains at present, or is about to."""
        if self._trainer is threading.current_thread() or not self._trainer.is_alive():
            return False
        trains = self.under_way()
        return not self._has_stepped if trains is None else trains

    def before_forward(self, module: nn.Module) -> None:
        """A module of the model is called."""
        if torch.is_grad_enabled() and self.trains:
            self._trainer = threading.current_thread()
        if torch.is_grad_enabled() or self.trains:
            self.leave()
            self._in_step = self._in_step or (self.trains and torch.is_grad_enabled())
        else:
            self.enter()

    def stepped(self) -> None:
        """An optimizer step and its exchange are done."""
        self._in_step, self._has_stepped, self._replaced = False, True, ([], [])
        self._writes.set()

    def merge(self) -> None:
        """A pass is over: all workers merge; the program sees the global model until it trains again."""
        self.leave()
        self.run.merge()
        self._in_step = False
        self._writes.set()
        self.enter()

    # -- in and out -------------------------------------------------------------------------------

    def enter(self) -> None:
        """Swap the global parameters in, unless the program loaded weights."""
        self._forget_loaded()
        if self._inside is not None or self.loaded_at:
            return
        self.catch_up()
        if self._inside is not None:
            return
        if self._writes.is_changed():
            self._reporter.say(
                f"{self._where()}: the program wrote into the model: it is evaluated and saved as it stands"
            )
            return
        self._inside = contextlib.ExitStack()
        with torch.inference_mode(False):  # kept tensors must be usable in training
            self._inside.enter_context(self.run.global_model())
        self._entered = digests(self._swapped())

    def look(self) -> None:
        """The program asks for a state dictionary: it gets the global parameters until it trains again."""
        if not self._in_step and not self.beside_training:
            self.enter()

    def leave(self) -> None:
        """Swap the worker's own parameters in; keep values that the program wrote meanwhile."""
        self._forget_loaded()
        if self._inside is None:
            return
        if not _same(self._entered, digests(self._swapped())):
            self.loaded_at = self.loaded_at or self._where()
        self._come_out()

    def _come_out(self) -> None:
        assert self._inside is not None
        inside, entered = self._inside, self._entered
        self._inside, self._entered = None, []
        with torch.inference_mode(False), self._kept() if self.loaded_at else contextlib.nullcontext():
            inside.close()
            if self.loaded_at:
                self._replaced = entered, [local(tensor).clone() for tensor in self._swapped()]

    @torch.no_grad()
    def _forget_loaded(self) -> None:
        """The program may have put the global parameters back that it had replaced: then it has loaded nothing."""
        entered, own = self._replaced
        if not (self.loaded_at and own):  # the global parameters wait for an exchange in flight
            return
        if _same(entered, digests(swapped := self._swapped())):
            with torch.inference_mode(False):
                for tensor, value in zip(swapped, own, strict=True):
                    local(tensor).copy_(value)
            self.loaded_at, self._replaced = "", ([], [])

    def load(self, module: nn.Module, original: Callable[[], Any]) -> Any:
        """Call `original`, which loads weights into a module in place of the global ones; returns its result."""
        if (
            self._has_stepped
            and self.run.world.size > 1
            and module.training
            and module_discovery.has_twin(module, self.roots)
        ):
            raise refusals.trained_copy(self._where(), module_discovery.name(module))
        self.enter()
        before = digests(self._tensors()) if self._is_shared else []
        found = original()
        if self._is_shared and not _same(before, digests(self._tensors())):
            self.loaded_at = self._where()
            if self._inside is not None:
                self._come_out()
        return found

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Context with the global parameters swapped in; restores the previous ones."""
        was = self._inside is not None or self.beside_training
        if not was:
            self.enter()
        try:
            yield
        finally:
            if not was and not self.beside_training:
                self.leave()

    def close(self) -> None:
        """End the run; keep weights that the program loaded."""
        self.leave()
        with self._kept() if self.loaded_at else contextlib.nullcontext():
            self.run.close()

    # -- what the model holds ---------------------------------------------------------------------

    @property
    def _is_shared(self) -> bool:
        """Whether there are other workers, or a global model that differs from this worker's."""
        return self.run.world.size > 1 or self.run._state.global_model is not None

    def _tensors(self) -> list[Tensor]:
        return list({id(t): t for root in self.roots for t in (*root.parameters(), *root.buffers())}.values())

    def _swapped(self) -> list[Tensor]:
        """The tensors that are swapped for the global ones."""
        ahead = self.run._state.global_model
        return [] if ahead is None else [tensor for lane in ahead.global_parts for tensor in lane.fragment.tensors]

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Context that restores the model's values."""
        with torch.no_grad():
            held = [(tensor, local(tensor).clone()) for tensor in self._tensors()]
            try:
                yield
            finally:
                for tensor, value in held:
                    local(tensor).copy_(value)


class WriteDetector:
    """Values of a few parameters after the last step, to detect when the program writes into the model.

    Args:
        view: the model.
    """

    def __init__(self, view: GlobalView) -> None:
        self._view = view
        trained = [p for root in view.roots for p in root.parameters() if p.requires_grad and p.numel()]
        self._looked_at = trained[:: -(-len(trained) // MARKS) or 1]
        self._blocks = -1
        self._held: list[Tensor] = []

    def set(self) -> None:
        """Record the values that training left."""
        if self._view.run._state.global_model is None or not self._view.run.rule.schedule.remembers_start:
            return
        with torch.inference_mode(False):
            self._held = [first_values(tensor) for tensor in self._looked_at]
        self._blocks = self._view.run.blocks

    def is_changed(self) -> bool:
        """Whether the program has written into most of them since; False if an exchange may have."""
        if not self._held or self._blocks != self._view.run.blocks:
            return False
        same = [
            torch.equal(held, first_values(tensor)) for held, tensor in zip(self._held, self._looked_at, strict=True)
        ]
        return 2 * sum(same) < len(same)


@torch.no_grad()
def digests(tensors: list[Tensor]) -> list[Tensor]:
    """Sum, norm and first values of each tensor, as bits; they change when it is written to."""
    with torch.inference_mode(False):
        return [_numbers(local(tensor)) for tensor in tensors if tensor.numel() and tensor.layout == torch.strided]


def _numbers(tensor: Tensor) -> Tensor:
    """Its sum, its norm and its first values."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = values.view(torch.uint8) if values.is_floating_point() and values.element_size() == 1 else values
    parts = [values.sum(dtype=torch.float64)]
    if values.is_floating_point():
        parts.append(torch.linalg.vector_norm(values, dtype=torch.float64))
    return torch.cat([torch.stack(parts), values.reshape(-1)[:FIRST].double()]).view(torch.int64)


@torch.no_grad()
def first_values(tensor: Tensor) -> Tensor:
    """A copy of the first few."""
    return local(tensor).reshape(-1)[:FIRST].clone()


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


class StateDicts:
    """`state_dict` and `load_state_dict` of the trained modules.

    A state dictionary refers to the model's memory, as always; it holds the global parameters until the program trains
    again. Loaded weights stay until the next step.

    Args:
        saved: called where the program asks for the state of another module.
    """

    def __init__(self, saved: Callable[[GlobalView, nn.Module], None]) -> None:
        self.view: GlobalView | None = None
        self._saved = saved
        self._depth = 0

    def state_dict(self, original: Any) -> Any:
        """`nn.Module.state_dict`."""

        def state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if asked_by_paceline():  # a checkpoint: the modules inside, which torch asks, give what is in memory, too
                self._depth += 1
                try:
                    return original(module, *args, **kwargs)
                finally:
                    self._depth -= 1
            if self._concerns(module):
                assert self.view is not None
                self.view.look()
            elif self.view is not None and not self._depth:
                self._saved(self.view, module)
            return original(module, *args, **kwargs)

        return state_dict

    def load_state_dict(self, original: Any) -> Any:
        """`nn.Module.load_state_dict`."""

        def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._concerns(module) or asked_by_paceline():
                return original(module, *args, **kwargs)
            assert self.view is not None
            self._depth += 1
            try:
                return self.view.load(module, lambda: original(module, *args, **kwargs))
            finally:
                self._depth -= 1

        return load_state_dict

    def _concerns(self, module: nn.Module) -> bool:
        """Whether it is part of the trained model, or a wrapper around one."""
        return self.view is not None and not self._depth and any(map(self.view.has, (module, *module.children())))

# SPDX-License-Identifier: Apache-2.0
"""The held-out losses of models that the workers might take: the user's function, called on each of them.

The user's model holds the candidate while the function is called. Afterwards parameters, buffers, gradients, modes and
random generators are as they were, so that a run whose members are all accepted has the bits of one without a guard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core import rng
from paceline.core.flat import Modules, local, module_list
from paceline.errors import UnsupportedError
from paceline.update.engine.blocks.chunks import OuterStateChunk
from paceline.update.engine.blocks.fragment_state import FragmentState
from paceline.update.exchange.audit import Candidate
from paceline.update.exchange.exchanger import Exchanger


class HeldOutLosses:
    """Evaluates models that follow from the contributions to an exchange.

    Args:
        held_out: the user's; gives the loss of the model.
        model: the user's modules.
        state: the outer state of all their parameters and buffers.
        chunks: gives the outer state as it was cut for the exchange.
        exchanger: the connection, which names this worker.
    """

    def __init__(
        self,
        held_out: Callable[[], Any],
        model: Modules,
        state: FragmentState,
        chunks: Callable[[], Sequence[OuterStateChunk]],
        exchanger: Exchanger,
    ) -> None:
        self._held_out, self._model, self._state, self._chunks = held_out, model, state, chunks
        self._exchanger = exchanger

    def __call__(self, candidates: Sequence[Candidate]) -> list[float]:
        """The loss of the block's start, and that of the mean of each candidate's contributions from there.

        Every evaluation begins with the same state of the random generators.
        """
        with untouched(self._model, self._tensors):
            for state in self._state.averaged:
                state.restore()
            found = [self._loss()]
        for summary, totals in candidates:
            with untouched(self._model, self._tensors):
                for chunk, total in zip(self._chunks(), totals, strict=True):
                    chunk.show(total, summary)
                found.append(self._loss())
        return found

    @property
    def _tensors(self) -> list[Tensor]:
        return [tensor for state in self._state.parameters for tensor in state.fragment.tensors]

    def _loss(self) -> float:
        value = self._held_out()
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedError(
                self._exchanger.transport.world.sign(
                    f"held_out of the guard must return a number, or a tensor of one element, got {str(value)[:80]!r}"
                )
            ) from error


@contextlib.contextmanager
def untouched(model: Modules, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Context without gradients; restores parameters, buffers, gradients, modes and global random generators.

    Args:
        model: the user's modules.
        parameters: those that change.
    """
    modules = list({id(one): one for _, top in module_list(model) for one in top.modules()}.values())
    values = [(local(tensor), local(tensor).clone()) for tensor in parameters]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    modes = [(module, module.training) for module in modules]
    gradients = [(p, p.grad) for module in modules for p in module._parameters.values() if p is not None]
    generators = rng.capture()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.no_grad():
            yield
    finally:
        rng.restore(generators)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        _put_back(values, buffers, modes)


@torch.no_grad()
def _put_back(
    values: Sequence[tuple[Tensor, Tensor]],
    buffers: Sequence[tuple[nn.Module, str, Tensor, Tensor]],
    modes: Sequence[tuple[nn.Module, bool]],
) -> None:
    for tensor, value in values:
        tensor.copy_(value)
    for module, name, buffer, value in buffers:
        buffer.copy_(value)
        module._buffers[name] = buffer  # the function may have put another tensor there
    for module, mode in modes:
        module.training = mode

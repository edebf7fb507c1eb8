# SPDX-License-Identifier: Apache-2.0
"""Runs over values that torch must not write to, such as JAX's arrays and TensorFlow's variables: they write to copies.

Most steps of a block rule do not touch the parameters. A step in which an exchange starts or ends copies the newest
values once, and hands the copies' memory back to the library as the new values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.doors.adapters.array_run import ArrayRun
from paceline.doors.adapters.views import check_trainable
from paceline.rules.rule import Rule
from paceline.update.engine.settings import Settings


class CopiedRun(ArrayRun):
    """A run over copies of the program's values; a library's run says how to read and replace them."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        rule: Rule,
        settings: Settings,
        *more: Any,
    ) -> None:
        super().__init__(parameters, buffers, rule, settings, *more)
        self._memory: dict[str, Tensor] = dict(self._model.named_parameters())  # type: ignore[union-attr]
        self._memory |= dict(self._model.named_buffers())  # type: ignore[union-attr]
        self._state.before_capture = self._copy_in
        if more:
            speeds = {name: self._stepper.state[p]["momentum_buffer"] for name, p in self._parameters.items()}
            self._memory |= {momentum_key(name): tensor for name, tensor in speeds.items()}
        if self._engine is not None:
            self._hand_out()

    def _newest(self) -> dict[str, Tensor]:
        """The newest values by name, as tensors that are only read."""
        raise NotImplementedError

    def _replace(self, memory: dict[str, Tensor]) -> None:
        """Make these the newest values; the memory is not written to any more."""
        raise NotImplementedError

    def _copy_in(self) -> None:
        """Copy the newest values into writable memory."""
        for name, tensor in copies(self._newest()).items():
            self._memory[name].data = tensor

    def _hand_out(self) -> None:
        """Turn that memory into the newest values."""
        self._replace({name: tensor.detach() for name, tensor in self._memory.items()})

    def _advance(self) -> None:
        """After the program's step: exchange if due."""
        if self.quiet:
            self._step()
        else:
            with self._written():
                self._step()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        self._copy_in()
        try:
            yield
        finally:
            self._hand_out()

    def close(self) -> None:
        """As for any run; the newest values are then those of the global model."""
        if not self._closed:
            with self._written():
                super().close()

    def resume(self, path: str | Path | None = None, **objects: Any) -> bool:
        """As for any run; the newest values are then those saved."""
        with self._written():
            return super().resume(path, **objects)

    def merge(self) -> None:
        """As for any run; the newest values are then those of the merged model."""
        with self._written():
            super().merge()

    def restore(self, snapshot: Any) -> None:
        """As for any run; the newest values are then those of the snapshot."""
        with self._written():
            super().restore(snapshot)

    def global_state(self) -> dict[str, Tensor]:
        """The global model's tensors by name; copies."""
        self._copy_in()
        return super().global_state()


def momentum_key(name: str) -> str:
    """The key of an array's momentum; names of arrays have no dot."""
    return f"momentum.{name}"


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies."""
    found = {}
    for name, tensor in tensors.items():
        check_trainable(name, tensor)
        found[name] = tensor.clone(memory_format=torch.contiguous_format)
    return found

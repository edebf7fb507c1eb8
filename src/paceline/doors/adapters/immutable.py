# SPDX-License-Identifier: Apache-2.0
"""Runs over immutable arrays such as JAX's: an exchange produces new arrays.

torch must not write into such an array. So a run writes to copies: most steps of a block rule do not touch the
parameters; a step in which an exchange starts or ends copies them once, and the library gets the copies' memory as new
arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from paceline.core.extras import needed
from paceline.doors.adapters.arrays import ArrayRun
from paceline.doors.adapters.views import check_trainable
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule
from paceline.update.engine.settings import Settings

with needed("the adapter for JAX", "jax"):
    import jax

Leaves = dict[str, Any]


class ImmutableRun(ArrayRun):
    """A run over immutable arrays; `leaves` are the newest, by name."""

    def __init__(self, leaves: Leaves, buffers: Leaves, rule: Rule, settings: Settings) -> None:
        self.leaves = {**leaves, **buffers}
        super().__init__(copies(leaves), copies(buffers), rule, settings)
        self._memory = dict(self._model.named_parameters()) | dict(self._model.named_buffers())  # type: ignore[union-attr]
        self._state.before_capture = self._copy_in
        if self._engine is not None:
            self._hand_out()

    def _copy_in(self) -> None:
        """Copy the newest arrays into writable memory."""
        for name, tensor in copies(self.leaves).items():
            self._memory[name].data = tensor

    def _hand_out(self) -> None:
        """Turn that memory into the newest arrays; it is not written to any more."""
        self.leaves = {name: jax.dlpack.from_dlpack(self._memory[name].detach()) for name in self.leaves}

    def advance(self, leaves: Leaves) -> Leaves:
        """After the program's step to `leaves`: exchange if due, and return the newest arrays."""
        if self._closed:
            return leaves
        self.leaves = leaves
        if self.quiet:
            self._step()
        else:
            with self._written():
                self._step()
        return self.leaves

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        self._copy_in()
        try:
            yield
        finally:
            self._hand_out()

    def close(self) -> None:
        """As for any run; the newest arrays then hold the global model."""
        if not self._closed:
            with self._written():
                super().close()

    def resume(self, path: str | Path | None = None, **objects: Any) -> bool:
        """As for any run; the newest arrays then hold the saved state."""
        with self._written():
            return super().resume(path, **objects)

    def merge(self) -> None:
        """As for any run; the newest arrays then hold the merged model."""
        with self._written():
            super().merge()

    def restore(self, snapshot: Any) -> None:
        """As for any run; the newest arrays then hold the snapshot."""
        with self._written():
            super().restore(snapshot)

    def global_state(self) -> dict[str, Tensor]:
        """The global model's tensors by name; copies."""
        self._copy_in()
        return super().global_state()

    def global_leaves(self) -> Leaves:
        """The global model's arrays by name."""
        return {name: jax.dlpack.from_dlpack(tensor) for name, tensor in self.global_state().items()}


def tensor_of(name: str, leaf: Any) -> Tensor:
    """A read-only tensor in the array's memory."""
    if isinstance(leaf, jax.core.Tracer):
        raise UnsupportedError(f"{name} is being traced; call this after the jitted function, not inside")
    if not isinstance(leaf, jax.Array):
        raise UnsupportedError(f"{name} is a {type(leaf).__name__} and no JAX array; use jax.numpy.asarray")
    if leaf.is_deleted():
        raise UnsupportedError(
            f"{name} was donated to a jitted function, and the run did not get the function's result; call "
            "params = run.sync(params) after each step"
        )
    if len(leaf.devices()) > 1:
        raise UnsupportedError(
            f"{name} lies on {len(leaf.devices())} devices; a worker has one device: start a process for each"
        )
    try:
        return from_dlpack(leaf)
    except (BufferError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise UnsupportedError(f"{name} of {leaf.dtype} cannot be shared with this torch: {error}") from error


def copies(leaves: Mapping[str, Any]) -> dict[str, Tensor]:
    """Contiguous copies of the arrays."""
    found = {}
    for name, leaf in leaves.items():
        tensor = tensor_of(name, leaf)
        check_trainable(name, tensor)
        found[name] = tensor.clone(memory_format=torch.contiguous_format)
    return found

# SPDX-License-Identifier: Apache-2.0
"""Runs over arrays that never change, as JAX's: what an exchange changes comes as new arrays.

A write through torch would change such an array behind the library's back. So a run writes to copies only: in most
steps of a block rule it does not touch the parameters at all; where an exchange begins or lands it copies them once,
and what comes out are new arrays in the copies' memory, which is the library's from then on.
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
    """A run over arrays that are never written to: what an exchange changes comes as new arrays.

    Attributes:
        leaves: name -> array, the newest.
    """

    def __init__(self, leaves: Leaves, buffers: Leaves, rule: Rule, settings: Settings) -> None:
        self.leaves = {**leaves, **buffers}
        super().__init__(copies(leaves), copies(buffers), rule, settings)
        self._memory = dict(self._model.named_parameters()) | dict(self._model.named_buffers())  # type: ignore[union-attr]
        self._state.before_capture = self._bring
        if self._engine is not None:
            self._hand_out()

    def _bring(self) -> None:
        """Copy the newest arrays into memory that may be written to."""
        for name, tensor in copies(self.leaves).items():
            self._memory[name].data = tensor

    def _hand_out(self) -> None:
        """What lies in that memory becomes the newest arrays, and is not written to any more."""
        self.leaves = {name: jax.dlpack.from_dlpack(self._memory[name].detach()) for name in self.leaves}

    def advance(self, leaves: Leaves) -> Leaves:
        """The program has made a step to `leaves`; returns those to go on with."""
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
        self._bring()
        try:
            yield
        finally:
            self._hand_out()

    def close(self) -> None:
        """As for any run; the global model is then in the newest arrays."""
        if not self._closed:
            with self._written():
                super().close()

    def resume(self, path: str | Path | None = None, **objects: Any) -> bool:
        """As for any run; what was saved is then in the newest arrays."""
        with self._written():
            return super().resume(path, **objects)

    def merge(self) -> None:
        """As for any run; what came of it is then in the newest arrays."""
        with self._written():
            super().merge()

    def restore(self, snapshot: Any) -> None:
        """As for any run; likewise."""
        with self._written():
            super().restore(snapshot)

    def global_state(self) -> dict[str, Tensor]:
        """The global model's tensors by name; copies."""
        self._bring()
        return super().global_state()

    def global_leaves(self) -> Leaves:
        """The global model's arrays by name."""
        return {name: jax.dlpack.from_dlpack(tensor) for name, tensor in self.global_state().items()}


def tensor_of(name: str, leaf: Any) -> Tensor:
    """The array's own memory as a tensor: to be read, and never written to."""
    if isinstance(leaf, jax.core.Tracer):
        raise UnsupportedError(f"{name} is being traced; call this behind the jitted function, not inside")
    if not isinstance(leaf, jax.Array):
        raise UnsupportedError(f"{name} is a {type(leaf).__name__} and no JAX array; use jax.numpy.asarray")
    if leaf.is_deleted():
        raise UnsupportedError(
            f"{name} was donated to a jitted function, and what came out of it has not come back; call "
            "params = run.sync(params) behind each step"
        )
    if len(leaf.devices()) > 1:
        raise UnsupportedError(
            f"{name} is spread over {len(leaf.devices())} devices; a worker is one device: start a process for each"
        )
    try:
        return from_dlpack(leaf)
    except (BufferError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise UnsupportedError(f"{name} of {leaf.dtype} cannot be shared with this torch: {error}") from error


def copies(leaves: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arrays' numbers in memory of their own, each in the order of its shape."""
    found = {}
    for name, leaf in leaves.items():
        tensor = tensor_of(name, leaf)
        check_trainable(name, tensor)
        found[name] = tensor.clone(memory_format=torch.contiguous_format)
    return found

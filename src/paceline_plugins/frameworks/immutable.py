# SPDX-License-Identifier: Apache-2.0
"""Runs over JAX's arrays, which never change: an exchange produces new arrays (:mod:`.copied`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack

from paceline.core.lazy import needed
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule
from paceline.update.engine.settings import Settings
from paceline_plugins.frameworks.copied import CopiedRun, copies

with needed("the adapter for JAX", "jax"):
    import jax

Leaves = dict[str, Any]


class ImmutableRun(CopiedRun):
    """A run over immutable arrays; `leaves` are the newest, by name."""

    def __init__(self, leaves: Leaves, buffers: Leaves, rule: Rule, settings: Settings) -> None:
        self.leaves = {**leaves, **buffers}
        super().__init__(copies(tensors_of(leaves)), copies(tensors_of(buffers)), rule, settings)

    def _newest(self) -> dict[str, Tensor]:
        return tensors_of(self.leaves)

    def _replace(self, memory: dict[str, Tensor]) -> None:
        self.leaves = {name: jax.dlpack.from_dlpack(memory[name]) for name in self.leaves}

    def advance(self, leaves: Leaves) -> Leaves:
        """After the program's step to `leaves`: exchange if due, and return the newest arrays."""
        if self._closed:
            return leaves
        self.leaves = leaves
        self._advance()
        return self.leaves

    def global_leaves(self) -> Leaves:
        """The global model's arrays by name."""
        return {name: jax.dlpack.from_dlpack(tensor) for name, tensor in self.global_state().items()}


def tensors_of(leaves: Leaves) -> dict[str, Tensor]:
    """Read-only tensors in the arrays' memory."""
    return {name: tensor_of(name, leaf) for name, leaf in leaves.items()}


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

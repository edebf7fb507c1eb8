# SPDX-License-Identifier: Apache-2.0
"""JAX programs, with or without optax: `params = run.sync(params)` after each step.

    run = attach(params, rule="bmuf", period=16)
    params = run.params                             # rank 0's, on all workers
    for inputs, targets in run.share(batches):
        params, opt_state = step(params, opt_state, inputs, targets)    # your own, jitted or not
        params = run.sync(params)
    run.close()
    params = run.params

Your arrays are never changed: an exchange produces new ones (:mod:`.immutable`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.core.lazy import needed
from paceline.doors.adapters.views import named
from paceline.rules.rule import Rule
from paceline.run.attach import prepare
from paceline.update.engine.settings import Settings
from paceline_plugins.frameworks.copied import copies
from paceline_plugins.frameworks.immutable import ImmutableRun, Leaves, tensor_of, tensors_of

with needed("the adapter for JAX", "jax"):
    import jax


class JaxRun(ImmutableRun):
    """A run over a tree of JAX arrays; made by `attach`.

    Attributes:
        opt_state: the optimizer's state, for checkpoints; `update` sets it, otherwise the program does.
    """

    def __init__(self, params: Any, optimizer: Any, opt_state: Any, rule: Rule, settings: Settings) -> None:
        leaves, self._tree = _named_leaves(params)
        self.opt_state, self._apply = opt_state, jax.jit(partial(_apply, optimizer)) if optimizer is not None else None
        super().__init__(leaves, {}, rule, settings)
        self._stale = any(not _same(leaves[name], now) for name, now in self.leaves.items())
        self.include(opt_state=_OptimizerState(self))

    @property
    def params(self) -> Any:
        """The newest parameters; read them after `attach`, `merge`, `resume`, `restore` and `close`."""
        self._stale = False
        return jax.tree_util.tree_unflatten(self._tree, list(self.leaves.values()))

    def sync(self, params: Any) -> Any:
        """After each step, outside of `jit`: returns the parameters to continue with, new arrays after an exchange.

        Raises:
            UnsupportedError: the tree, a shape or a dtype differs from attach; the run continues with the next valid
                call.
        """
        if self._closed:
            return params
        if self._stale:
            raise self._unsupported("the run has newer parameters than yours; continue from params = run.params")
        given = self._leaves_like("parameter", params)
        return params if self.advance(given) is given else self.params

    def mean(self, gradients: Any) -> Any:
        """The mean of a tree of gradients over the workers, as new arrays; the tree itself if none is exchanged."""
        if not self._gradients_due:
            return gradients
        for name, tensor in copies(tensors_of(self._leaves_like("gradient", gradients))).items():
            self._parameters[name].grad = tensor
        found = self._exchange_gradients()
        arrays = [jax.dlpack.from_dlpack(found[name]) for name in self._parameters]
        return jax.tree_util.tree_unflatten(self._tree, arrays)

    def update(self, gradients: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        """optax's update and `sync`, under any rule: (params, opt_state) from this worker's gradients."""
        if self._apply is None:
            raise self._unsupported("update needs the optax optimizer: attach(params, optimizer=optimizer)")
        params, self.opt_state = self._apply(self.mean(gradients), opt_state, params)
        return self.sync(params), self.opt_state

    def _leaves_like(self, what: str, tree: Any) -> Leaves:
        found, shape = _named_leaves(tree)
        if shape != self._tree:
            raise self._unsupported(f"the tree of {what}s is {shape}, and was attached as {self._tree}")
        self._check_like(what, tensors_of(found))
        return found

    def merge(self) -> None:
        """As for any run; continue from `params`."""
        super().merge()
        self._stale = self._engine is not None

    def resume(self, path: str | Path | None = None, **objects: Any) -> bool:
        """As for any run; continue from `params` and `opt_state`."""
        self._stale = super().resume(path, **objects) or self._stale
        return self._stale

    def model_for_export(self) -> Any:
        """The global parameters, in the structure of those attached."""
        return jax.tree_util.tree_unflatten(self._tree, list(self.global_leaves().values()))

    @contextlib.contextmanager
    def global_model(self) -> Iterator[Any]:
        """The global parameters; yours do not change."""
        yield self.model_for_export()


class _OptimizerState:
    """The optimizer's state, for checkpoints."""

    def __init__(self, run: JaxRun) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves(self._run.opt_state)
        return {str(k): tensor_of(str(k), leaf).clone() for k, leaf in enumerate(leaves)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _, tree = jax.tree_util.tree_flatten(self._run.opt_state)
        leaves = [jax.dlpack.from_dlpack(state[str(k)].clone()) for k in range(len(state))]
        self._run.opt_state = jax.tree_util.tree_unflatten(tree, leaves)


def attach(
    params: Any, rule: Rule | str | None = None, *, optimizer: Any = None, opt_state: Any = None, **settings: Any
) -> JaxRun:
    """Attach paceline to a tree of JAX arrays; continue from `params = run.params`.

    Args:
        params: the tree; each array on one device.
        rule: as for `paceline.attach`. Where it exchanges gradients, call `gradients = run.mean(gradients)` before the
            update, or `run.update`.
        optimizer: an optax optimizer, for `run.update`.
        opt_state: its state, for checkpoints.
        settings: as for `paceline.attach`.

    Raises:
        UnsupportedError: an array or the rule is not supported.
        MismatchError: the workers' trees differ (on every worker alike).
    """
    return JaxRun(params, optimizer, opt_state, *prepare(rule, **settings))


def _apply(optimizer: Any, gradients: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return jax.tree_util.tree_map(lambda p, u: (p + u).astype(p.dtype), params, updates), opt_state


def _named_leaves(tree: Any) -> tuple[Leaves, Any]:
    pairs, shape = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/") or "params": leaf for path, leaf in pairs}
    return named(leaves), shape


def _same(one: Any, other: Any) -> bool:
    return torch.equal(tensor_of("", one).view(-1), tensor_of("", other).view(-1))

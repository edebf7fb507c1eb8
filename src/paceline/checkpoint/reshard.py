# SPDX-License-Identifier: Apache-2.0
"""Resumes a checkpoint of N workers on M workers.

State that all N held alike comes from rank 0's files: step counts, schedulers, included objects, the outer state. The
global model is the checkpoint's. State that differed between workers is

- resharded: the shards of an asynchronous server (:mod:`paceline.update.server.sharding`),
- averaged over the N workers: the state of optimizers that step on the workers,
- reset: a codec's residuals, a block under way, paces, clocks.

Each worker reads only the files that it needs, and checks their sums. Nothing changes before all workers have read
theirs and checked that it fits.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint.files import GLOBAL, Read, checked, rank_names, read_json, read_tensors
from paceline.core import rng, runtime
from paceline.core.state_tree import build
from paceline.errors import CheckpointError


class _Tensors(dict[str, Tensor]):
    """The tensors of a file, each read on access and not cached."""

    def __init__(self, manifest: dict[str, Any], name: str) -> None:
        super().__init__()
        self._manifest, self._name = manifest, name
        self._file: Any = None

    def __missing__(self, key: str) -> Tensor:
        if self._file is None:
            with runtime.disk().reading(checked(self._manifest, self._name)) as there:
                self._file = safe_open(there, framework="pt")
        tensor: Tensor = self._file.get_tensor(key)
        return tensor


class OldCheckpoint:
    """A checkpoint of N workers; its files are read, and their sums checked, on access."""

    def __init__(self, manifest: dict[str, Any], read_frozen: Read) -> None:
        self.size, self.read_frozen = int(manifest["size"]), read_frozen
        self._manifest = manifest
        self._rests: dict[int, Any] = {}
        self._tensors: list[dict[str, Tensor]] = [_Tensors(manifest, rank_names(r)[0]) for r in range(self.size)]

    def _find(self, rank: int, path: tuple[str | int, ...]) -> Any:
        """The entry `path` of a rank's state as JSON, or None."""
        if rank not in self._rests:
            self._rests[rank] = read_json(checked(self._manifest, rank_names(rank)[1]))
        value = self._rests[rank]
        for step in path:
            inside = step < len(value) if isinstance(value, list) and isinstance(step, int) else step in (value or ())
            if not inside:
                return None
            value = value[step]
        return value

    def part(self, rank: int, *path: str | int) -> Any:
        """What rank `rank` saved under these keys and numbers; None if there is no such entry."""
        return build(self._find(rank, path), self._tensors[rank])

    def keys(self, rank: int, *path: str | int) -> list[str]:
        """The keys of a dictionary; [] if there is no such entry."""
        return list(self._find(rank, path) or {})

    def model(self) -> dict[str, Tensor]:
        """The global model, without tensors that the state has under "frozen" or "tied"."""
        return read_tensors(checked(self._manifest, GLOBAL))


# -- the optimizers of several workers ---------------------------------------------------------------------------------


class _Mean:
    """The mean of the workers' tensors of one entry; the first worker's if another has a different shape.

    Sums have 64 bits, so that the mean of equal numbers is that number. Tensors that are not finite do not count.
    """

    def __init__(self, first: Tensor) -> None:
        self._first, self._fits, self._alike = first, True, True
        self._total: Tensor | None = None
        self._count = 0
        self.add(first)

    def add(self, other: Any) -> None:
        """Add one more worker's tensor."""
        first = self._first
        if not isinstance(other, Tensor) or other.shape != first.shape or other.dtype != first.dtype:
            self._fits = False
            return
        self._alike = self._alike and torch.equal(other, first)
        if bool(torch.isfinite(other).all()):
            wide = other.to(torch.complex128 if other.is_complex() else torch.float64)
            self._total = self._total.add_(wide) if self._total is not None else wide.clone() if wide is other else wide
            self._count += 1

    @property
    def value(self) -> Tensor:
        """The mean, in the dtype of the tensors."""
        if self._alike or not self._fits or self._total is None:
            return self._first
        return (self._total / self._count).to(self._first.dtype)


def mean_optimizers(old: OldCheckpoint) -> list[dict[str, Any]]:
    """State dictionaries of the optimizers, with the mean over the workers of floating-point tensors.

    Numbers and parameter groups are rank 0's. State that only some workers have (a parameter had no gradient elsewhere)
    is averaged over these.
    """
    optimizers: list[dict[str, Any]] = old.part(0, "optimizers")
    means = [{k: _means(v) for k, v in one["state"].items()} for one in optimizers]
    for rank in range(1, old.size):
        for mean, one in zip(means, old.part(rank, "optimizers"), strict=True):
            for parameter, kept in one["state"].items():
                known = mean.setdefault(parameter, {})
                for key, value in kept.items():
                    if isinstance(known.get(key), _Mean):
                        known[key].add(value)
                    elif key not in known:
                        known[key] = _means({key: value})[key]
    for one, mean in zip(optimizers, means, strict=True):
        one["state"] = {
            parameter: {key: v.value if isinstance(v, _Mean) else v for key, v in kept.items()}
            for parameter, kept in mean.items()
        }
    return optimizers


def _means(kept: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state of one parameter, with means instead of its floating-point tensors."""
    return {
        k: _Mean(v) if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) else v
        for k, v in kept.items()
    }


# -- what fits ---------------------------------------------------------------------------------------------------------


def check_model(own: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Raise `CheckpointError` if the names or shapes of two state dictionaries differ."""
    for name in sorted(own.keys() | saved.keys()):
        if name not in saved or name not in own:
            where = "the model" if name in own else "the checkpoint"
            raise CheckpointError(f"the checkpoint does not fit the model: only {where} has {name}")
        if own[name].shape != saved[name].shape:
            raise CheckpointError(
                f"the checkpoint does not fit the model: {name} has the shape {tuple(own[name].shape)} here and "
                f"{tuple(saved[name].shape)} in the checkpoint"
            )


def check_optimizers(optimizers: list[Optimizer], saved: list[dict[str, Any]]) -> None:
    """Raise `CheckpointError` if the optimizers have other parameters than the saved ones."""
    own = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
    then = [[len(group["params"]) for group in one["param_groups"]] for one in saved]
    if own != then:
        raise CheckpointError(
            f"the checkpoint does not fit the optimizers: their groups have {own} parameters here and {then} in the "
            "checkpoint; resume with the optimizers that saved it"
        )
    for optimizer, one in zip(optimizers, saved, strict=True):
        for group in one["param_groups"]:
            lacks = sorted(set(optimizer.defaults) - set(group))
            has = sorted(set(group) - {*optimizer.defaults, "params", "initial_lr"})
            if lacks and has:  # a newer torch may only add some
                raise CheckpointError(
                    f"the checkpoint was made with another optimizer than {type(optimizer).__name__}: it has "
                    f"{', '.join(has)}, and lacks {', '.join(lacks)}; resume with the one that saved it"
                )


def check_kinds(path: object, optimizers: list[Optimizer], saved: list[str] | None) -> None:
    """Raise `CheckpointError` if the checkpoint names other optimizers."""
    own = [type(optimizer).__name__ for optimizer in optimizers]
    if saved is not None and saved != own:
        raise CheckpointError(
            f"{path} was made with {', '.join(saved)}, and this run trains with {', '.join(own)}; resume with the "
            "optimizers that saved it, or begin a new run from its global model"
        )


# -- generators --------------------------------------------------------------------------------------------------------


def random_state(old: OldCheckpoint, rank: int, seed: int) -> dict[str, Any]:
    """The random generators of the new rank `rank`: those of the same old rank, if there was one.

    Else they are seeded from the run's seed, the rank and the step count.
    """
    if rank < old.size:
        saved: dict[str, Any] = old.part(rank, "random")
        return saved
    own = rng.mix(seed, rank, int(old.part(0, "flow", 0)))
    with rng.seeded(own):
        state = rng.capture()
    if "cuda" in state:
        state["cuda"] = torch.Generator("cuda").manual_seed(own).get_state()
    return state

# SPDX-License-Identifier: Apache-2.0
"""Two models of opposite directions that are trained together, and the two priors that judge their outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline import CheckpointError, UnsupportedError
from paceline_dual.protocols import Conditional, Prior

DIRECTIONS = ("forward", "backward")
"""x -> y and y -> x."""
WEIGHTS = "weights.safetensors"
Mine = TypeVar("Mine", bound="Pair")


@dataclass(frozen=True)
class Direction:
    """One of the two tasks.

    Attributes:
        name: "forward" or "backward".
        primal: P(target | source), the model of this task.
        dual: P(source | target), the model of the opposite task.
        prior_source: P(source).
        prior_target: P(target).
    """

    name: str
    primal: Conditional
    dual: Conditional
    prior_source: Prior
    prior_target: Prior


class Pair(nn.Module):
    """P(y | x) and P(x | y), with the priors P(x) and P(y).

    The two models are registered modules: they are trained, exchanged and saved. The priors are not: they are frozen,
    always in evaluation mode, and not in the state dictionary. `to` moves them with the pair.

    Args:
        forward_model: P(y | x).
        backward_model: P(x | y).
        prior_x: P(x).
        prior_y: P(y).

    Raises:
        UnsupportedError: one of the four is no torch module, or two of them share a parameter.
    """

    forward_model: Conditional
    backward_model: Conditional

    def __init__(self, forward_model: Conditional, backward_model: Conditional, prior_x: Prior, prior_y: Prior) -> None:
        super().__init__()
        named = {"forward_model": forward_model, "backward_model": backward_model}
        _check_modules({**named, "prior_x": prior_x, "prior_y": prior_y})
        self.forward_model, self.backward_model = forward_model, backward_model
        self._priors = (cast(nn.Module, prior_x), cast(nn.Module, prior_y))  # a plain tuple: not registered
        _check_apart(*self.models, self._priors)
        for prior in self._priors:
            prior.eval().requires_grad_(False)

    @property
    def prior_x(self) -> Prior:
        """P(x)."""
        return cast(Prior, self._priors[0])

    @property
    def prior_y(self) -> Prior:
        """P(y)."""
        return cast(Prior, self._priors[1])

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        """P(y | x) and P(x | y), as modules."""
        return cast(nn.Module, self.forward_model), cast(nn.Module, self.backward_model)

    @property
    def priors(self) -> tuple[nn.Module, nn.Module]:
        """P(x) and P(y), as modules."""
        return self._priors

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    def direction(self, name: str) -> Direction:
        """One of the two tasks; `name` is "forward" or "backward"."""
        there, back = self.forward_model, self.backward_model
        if name == "forward":
            return Direction(name, there, back, self.prior_x, self.prior_y)
        if name == "backward":
            return Direction(name, back, there, self.prior_y, self.prior_x)
        raise UnsupportedError(f"a direction is one of {', '.join(DIRECTIONS)}; got {name!r}")

    def _apply(self: Mine, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Mine:
        for prior in self._priors:
            prior._apply(fn, recurse)  # type: ignore[no-untyped-call]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def save(self, folder: Path) -> None:
        """Write all four into `forward`, `backward`, `prior_x` and `prior_y` below `folder`.

        Each is written by its own `save(folder)` if it has one and a `load`, else as a state dictionary.
        """
        for name, module in self._parts().items():
            inner = folder / name
            inner.mkdir(parents=True, exist_ok=True)
            if _saves_itself(module):
                cast(Any, module).save(inner)
            else:
                save_file({key: x.detach().cpu().contiguous() for key, x in _once(module)}, inner / WEIGHTS)

    def load(self, folder: Path) -> None:
        """Load into these modules what `save` wrote of modules of the same shape.

        Models with their own `save` are read by `type(model).load(folder)`; their weights are copied.

        Raises:
            CheckpointError: something is missing, damaged, or of another shape.
        """
        for name, module in self._parts().items():
            inner = folder / name
            if _saves_itself(module):
                found: dict[str, Tensor] = cast(Any, type(module)).load(inner).state_dict()
            else:
                found = _weights(inner / WEIGHTS, module)
            try:
                module.load_state_dict(found)
            except RuntimeError as error:
                raise CheckpointError(f"{inner} does not fit the pair: {error}; build it as it was") from error

    def _parts(self) -> dict[str, nn.Module]:
        names = ("forward", "backward", "prior_x", "prior_y")
        return dict(zip(names, (*self.models, *self._priors), strict=True))


def _check_modules(named: dict[str, Any]) -> None:
    for name, model in named.items():
        if not isinstance(model, nn.Module):
            raise UnsupportedError(
                f"{name} has to be a torch.nn.Module, got a {type(model).__name__}; wrap it in a module"
            )


def _check_apart(there: nn.Module, back: nn.Module, priors: tuple[nn.Module, nn.Module]) -> None:
    """No parameter belongs to both models, or to a model and a prior: each has its own rate, or none."""
    first, second = ({id(p) for p in model.parameters()} for model in (there, back))
    frozen = {id(p) for p in itertools.chain(*(prior.parameters() for prior in priors))}
    for what, shared in (("the two models", first & second), ("a model and a prior", (first | second) & frozen)):
        if shared:
            raise UnsupportedError(
                f"{what} share {len(shared)} parameter{'s' if len(shared) > 1 else ''}; give each its own, such as "
                "copy.deepcopy(model)"
            )


def _saves_itself(module: nn.Module) -> bool:
    return callable(getattr(module, "save", None)) and callable(getattr(type(module), "load", None))


def _once(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The state dictionary, cloned: safetensors refuses shared memory."""
    return [(key, x.clone()) for key, x in module.state_dict().items()]


def _weights(path: Path, module: nn.Module) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the weights of {type(module).__name__} in {path}: {error}; train again, or copy them anew"
        ) from error

# SPDX-License-Identifier: Apache-2.0
"""The state that torch's optimizers keep for each parameter, and its moving averages.

A *moment* is a state tensor with the parameter's shape that follows s <- b s + (anything stationary): its value after k
steps is b^k s_0 + (1 - b^k) E for a fixed E, whatever the scale of E. Examples are Adam's two moments and the momentum
buffers of SGD (b s + g) and Muon (b s + (1 - b) g). Moment compensation (:mod:`paceline.rules.outer.moments`) needs
only this property.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.errors import UnsupportedError

Named = list[tuple[str, nn.Parameter]]
"""Parameters with their names."""
Owned = list[tuple[Optimizer, Named]]
"""Optimizers with the parameters that each of them trains."""


@dataclass(frozen=True)
class OptimizerMoment:
    """One moving average that an optimizer keeps."""

    key: str  # its name in `optimizer.state[parameter]`
    decay: Callable[[dict[str, object]], float]  # b of a parameter group, when it is used: schedulers change it
    square: bool = False  # whether it averages squares, which are never negative


def _beta(index: int) -> Callable[[dict[str, object]], float]:
    def decay(group: dict[str, object]) -> float:
        return float(group["betas"][index])  # type: ignore[index]

    return decay


def _momentum(group: dict[str, object]) -> float:
    return float(group["momentum"])  # type: ignore[arg-type]


_ADAM = (OptimizerMoment("exp_avg", _beta(0)), OptimizerMoment("exp_avg_sq", _beta(1), square=True))
_BUFFER = (OptimizerMoment("momentum_buffer", _momentum),)
_WITH_BUFFER: tuple[type[Optimizer], ...] = (SGD, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []))
"""SGD, and Muon where torch has it (2.9)."""


def is_adam(optimizer: Optimizer) -> bool:
    """Whether it is Adam, AdamW or a subclass."""
    return isinstance(optimizer, (Adam, AdamW))


CYCLED = "max_momentum"
"""A torch scheduler that cycles beta1 (OneCycleLR, CyclicLR) puts this key into its groups."""
OWN_BETA1 = "own_beta1"
"""Key of the beta1 of the program, in a group where it was lowered."""


def lower_beta1(optimizer: Optimizer, most: float, cycled: bool = False) -> None:
    """Adam's beta1 becomes at most `most`, in every parameter group, or in those whose beta1 a scheduler cycles."""
    for group in optimizer.param_groups:
        if cycled and CYCLED not in group:
            continue
        first, second = group["betas"]
        if first > most:
            group["betas"], group[OWN_BETA1] = (most, second), [first, most]


def restore_beta1(optimizer: Optimizer) -> None:
    """Adam's beta1 becomes what it was before `lower_beta1`, unless it was changed since."""
    for group in optimizer.param_groups:
        own, lowered = group.pop(OWN_BETA1, (None, None))
        if own is not None and group["betas"][0] == lowered:
            group["betas"] = (own, group["betas"][1])


def keeps_maximum(optimizer: Optimizer) -> bool:
    """Whether it keeps a running maximum of second moments (amsgrad)."""
    return any(group.get("amsgrad") for group in optimizer.param_groups)


def moments(optimizer: Optimizer) -> tuple[OptimizerMoment, ...]:
    """The optimizer's moments; empty for an unknown optimizer."""
    if is_adam(optimizer):
        return _ADAM
    if isinstance(optimizer, _WITH_BUFFER):
        return _BUFFER
    return ()


def keeps_state(optimizer: Optimizer) -> bool:
    """Whether the optimizer has state; plain SGD has none."""
    return not (isinstance(optimizer, SGD) and all(group["momentum"] == 0 for group in optimizer.param_groups))


def refuse_uncompensated(optimizer: Optimizer) -> None:
    """Raise `UnsupportedError` if moment compensation is not defined for `optimizer`."""
    name = type(optimizer).__name__
    if not moments(optimizer):
        raise UnsupportedError(
            f"moment compensation is defined for torch's Adam, AdamW, SGD and Muon, not for {name}; "
            'use one of them, or a rule with local_state="average" or "keep"'
        )
    if keeps_maximum(optimizer):
        raise UnsupportedError(
            f"{name}(amsgrad=True) keeps a running maximum for which no compensation is defined; "
            'use amsgrad=False, or local_state="keep"'
        )


def parameter_state(optimizer: Optimizer, parameter: Tensor, key: str) -> Tensor | None:
    """The state tensor `key` of `parameter`, or None if the optimizer has not created it yet."""
    value = optimizer.state.get(parameter, {}).get(key)
    return value if isinstance(value, Tensor) else None


@torch.no_grad()
def ensure_state(optimizer: Optimizer, parameter: Tensor) -> None:
    """Create the state that the optimizer would create at the first step, if `parameter` has none yet.

    If a parameter has a gradient on some workers only, all must start the next block from the same moments.
    """
    state = optimizer.state[parameter]
    if is_adam(optimizer):
        if "exp_avg" in state:
            return
        group = _group_of(optimizer, parameter)
        on_device = bool(group.get("capturable")) or bool(group.get("fused"))
        device = parameter.device if on_device else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if group.get("amsgrad"):
            state["max_exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    elif isinstance(optimizer, _WITH_BUFFER) and state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, object]:
    for group in optimizer.param_groups:
        if any(p is parameter for p in group["params"]):
            return group
    raise AssertionError("the parameter belongs to no group of its own optimizer")


def step_count(optimizer: Optimizer, parameters: list[Tensor]) -> float:
    """Adam's bias-correction counter: the largest over the parameters, 0 before the first step."""
    counts = [0.0]
    for parameter in parameters:
        step = optimizer.state.get(parameter, {}).get("step")
        if step is not None:
            counts.append(float(step))
    return max(counts)


@torch.no_grad()
def set_step_count(optimizer: Optimizer, parameters: list[Tensor], count: float) -> None:
    """Write a real-valued counter; torch keeps it as float32 and uses it only for the bias correction."""
    for parameter in parameters:
        step = optimizer.state.get(parameter, {}).get("step")
        if isinstance(step, Tensor):
            step.fill_(count)


@torch.no_grad()
def reset_state(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Reset the optimizer's state to that before its first step.

    The state of known optimizers is zeroed in place (a captured graph may use its addresses), that of others dropped.
    """
    in_place = is_adam(optimizer) or (
        isinstance(optimizer, _WITH_BUFFER) and all(g.get("dampening", 0) == 0 for g in optimizer.param_groups)
    )
    for parameter in parameters:
        state = optimizer.state.get(parameter)
        if not state:
            continue
        if not in_place:
            state.clear()
            continue
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()

# SPDX-License-Identifier: Apache-2.0
"""Which optimizers can step at the owners of shards, and the state that they have at attach."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from paceline.core.flat import Fragment, flat_view
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, RMSprop, NAdam, RAdam, Rprop, ASGD,
)  # fmt: skip
"""Element-wise optimizers: an owner can step a shard without the rest of a tensor."""
COUNTERS = ("step", "mu_product", "eta", "mu")
"""State that they keep once for a parameter, also where the parameter has no dimensions."""


def check_optimizer(rule: Rule, optimizer: Optimizer) -> None:
    """Refuse optimizers that cannot step at the owners of shards."""
    if not rule.steps_at_owners:
        return
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise UnsupportedError(
            f"under {rule.text()} the owners of slices make the optimizer's step, each on its own slice, and {name} is "
            f"not known to treat every number alike; use one of torch's {known}, or asgd(period=...), "
            "where the optimizer steps on the worker"
        )
    outer: Any = rule.outer
    outer.resolve(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError(f"{name}(differentiable=True) cannot step on another worker")


@torch.no_grad()
def optimizer_state(
    optimizer: Optimizer, fragment: Fragment, begin: int, end: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The optimizer's present state for elements begin .. end (excl.) of a fragment."""
    rows: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for slot, tensor in zip(fragment.slots, fragment.tensors, strict=True):
        for key, value in optimizer.state.get(tensor, {}).items():
            if isinstance(value, Tensor) and value.shape == tensor.shape and key not in COUNTERS:
                row = rows.setdefault(key, torch.zeros(fragment.numel, dtype=fragment.outer_dtype))
                row[slot.offset : slot.end].copy_(flat_view(key, value))
            elif isinstance(value, Tensor) and value.numel() == 1:
                numbers[f"optimizer.{key}"] = max(float(value), numbers.get(f"optimizer.{key}", 0.0))
    return {f"optimizer.{key}": row[begin:end].clone() for key, row in rows.items()}, numbers

# SPDX-License-Identifier: Apache-2.0
"""The names of settings that can be tuned, and their valid values.

=================  =======================================================================================
of optimizers      lr, lr_factor, momentum, betas, weight_decay, eps; of one parameter group lr@1, ..
of the rule        period, gain, outer_momentum, outer_lr
=================  =======================================================================================

A name without `@` means every group that has such a setting. Groups are numbered from 0 through all optimizers, in the
order of `attach`. :func:`flat` turns a program's request into a flat dictionary of JSON values, as workers send it and
request files hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.parse import check, check_number, check_whole, is_number, like
from paceline.errors import RuleError

OF_OPTIMIZERS = ("lr", "lr_factor", "momentum", "betas", "weight_decay", "eps")
OF_RULES = ("period", "gain", "outer_momentum", "outer_lr")
MOST_NAMES = 1000
"""The most settings of a request."""

Changes = dict[str, Any]


def flat(settings: Mapping[str, Any]) -> Changes:
    """A request as name -> JSON value; `RuleError` for an invalid name or value.

    Args:
        settings: such as `{"lr": 0.1}`, `{"lr": {0: 0.1, 1: 0.2}}` or `{"lr@1": 0.2}`.
    """
    if not settings:
        raise RuleError(f"nothing to tune: name what is to change, such as lr=0.01; there are {_all()}")
    changes: Changes = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            changes |= {f"{name}@{group}": one for group, one in value.items()}
        else:
            changes[str(name)] = value
    if len(changes) > MOST_NAMES:
        raise RuleError(f"a request names at most {MOST_NAMES} settings, got {len(changes)}")
    return {name: checked(name, value) for name, value in changes.items()}


def split(name: str) -> tuple[str, int | None]:
    """`lr@1` -> ("lr", 1), and `lr` -> ("lr", None)."""
    base, at, group = name.partition("@")
    if base not in (*OF_OPTIMIZERS, *OF_RULES):
        raise RuleError(f"{base!r} cannot be tuned{like(base, [*OF_OPTIMIZERS, *OF_RULES])}; there are {_all()}")
    if not at:
        return base, None
    if base in OF_RULES or not group.isdecimal():
        raise RuleError(f"{name!r} names no parameter group; write lr@0, lr@1, ..")
    return base, int(group)


def checked(name: str, value: Any) -> Any:
    """The value as JSON; `RuleError` if it is invalid for `name` under every rule."""
    base, _ = split(name)
    if base == "betas":
        check(isinstance(value, (list, tuple)) and len(value) == 2, name, "two numbers such as (0.9, 0.999)", value)
        fits = all(is_number(one) and 0 <= one < 1 for one in value)
        check(fits, name, "two numbers from 0 to below 1", value)
        return [float(one) for one in value]
    if base == "period":
        check_whole(name, value, 1, "of minibatches")
        return value
    if base == "gain" and value in ("auto", "paper"):
        return value
    check(is_number(value), name, "a finite number", value)
    if base in ("momentum", "outer_momentum"):
        check_number(name, value, 0, 1)
    elif base in ("lr", "weight_decay"):
        check(value >= 0, name, "at least 0", value)
    else:
        check(value > 0, name, "above 0", value)
    return value


def _all() -> str:
    return f"{', '.join(OF_OPTIMIZERS)} of optimizers, and {', '.join(OF_RULES)} of the rule"

# SPDX-License-Identifier: Apache-2.0
"""Methods of other libraries that paceline wraps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace_method(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """`owner.name` becomes `wrap` of what it was; `owner` is a class or an object of another library."""
    setattr(owner, name, wrap(getattr(owner, name)))

# SPDX-License-Identifier: Apache-2.0
"""Functions of other libraries that zero lines stand in for, in this process only, and how they are put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class Patches(contextlib.ExitStack):
    """Replaced attributes; leaving the context puts back what was there."""

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in the place of an attribute."""
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        self.callback(setattr, owner, name, original)

    def hook(self, register: Callable[[Callable[..., Any]], Any], function: Callable[..., Any]) -> None:
        """Give torch's `register` a hook that goes with the rest."""
        self.callback(register(function).remove)

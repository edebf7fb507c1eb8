# SPDX-License-Identifier: Apache-2.0
"""Patches functions of other libraries in this process, and restores them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class Patches(contextlib.ExitStack):
    """Replaced attributes; leaving the context restores them."""

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by `make(original)`."""
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        self.callback(setattr, owner, name, original)

    def hook(self, register: Callable[[Callable[..., Any]], Any], function: Callable[..., Any]) -> None:
        """Give torch's `register` a hook; leaving the context removes it."""
        self.callback(register(function).remove)

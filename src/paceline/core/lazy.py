# SPDX-License-Identifier: Apache-2.0
"""Packages whose names load when they are first used, so that an import brings no more than a program uses (PEP 562).

A package that does so names each thing twice: in imports under `TYPE_CHECKING`, for type checkers and readers, and in
its call of `lazily`. tests/test_install.py holds the two together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    Args:
        package: its `__name__`.
        names: name -> the module within the package that it comes from. Modules of the package are found beside them.
    """

    def load(name: str) -> Any:
        value = getattr(import_module(f"{package}.{names[name]}"), name) if name in names else _module(package, name)
        setattr(sys.modules[package], name, value)  # found at once from now on
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return load, listed


def _module(package: str, name: str) -> Any:
    whole = f"{package}.{name}"
    if not name.startswith("_"):
        try:
            return import_module(whole)
        except ModuleNotFoundError as error:
            if error.name != whole:
                raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])

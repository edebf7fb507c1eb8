# SPDX-License-Identifier: Apache-2.0
"""Packages whose names load on first use (PEP 562), and the error that names the extra of an optional package.

Such a package lists its names twice: in imports under `TYPE_CHECKING`, and in its call of `lazily`. The tests of the
installed package compare the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from paceline.errors import PacelineError


def lazily(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, from its `__name__` and name -> module within it; the package's modules
    load by their own names."""

    def load(name: str) -> Any:
        value = getattr(import_module(f"{package}.{names[name]}"), name) if name in names else _module(package, name)
        setattr(sys.modules[package], name, value)  # later accesses skip this function
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


class MissingExtraError(PacelineError, ImportError):
    """A package that belongs to an extra is not installed."""


@contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Context for the import of an optional package, which `extra` of paceline installs; `what` needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{what} needs {error.name}, which is not installed: pip install 'paceline[{extra}]'", name=error.name
        ) from error

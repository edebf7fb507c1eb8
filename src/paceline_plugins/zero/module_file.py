# SPDX-License-Identifier: Apache-2.0
"""Finds the file that `python -m package.module` runs, and imports nothing."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from paceline.errors import UnsupportedError


def find(name: str) -> tuple[Path, Path]:
    """The file of a module, or of a package's `__main__`, and the folder from which its package is imported.

    Raises:
        UnsupportedError: there is none; the message says what is missing.
    """
    folders, spec = [os.getcwd()], None
    for number, part in enumerate(name.split(".")):
        spec = PathFinder.find_spec(part, folders)
        if spec is None and number == 0:
            spec = _installed(part)
        if spec is None:
            raise UnsupportedError(
                f"there is no module {name}: {part!r} is missing (looked in {os.getcwd()}, and where Python looks)"
            )
        folders = list(spec.submodule_search_locations or ())
    depth = name.count(".")
    if folders:
        spec, depth = PathFinder.find_spec("__main__", folders), depth + 1
        if spec is None:
            raise UnsupportedError(f"{name} is a package without __main__.py, which -m would run; name a module of it")
    if spec is None or not spec.has_location or spec.origin is None:
        raise UnsupportedError(f"the module {name} has no file that can be run")
    return Path(spec.origin), Path(spec.origin).resolve().parents[depth]


def _installed(part: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(part) if part else None
    except (ImportError, ValueError):
        return None


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether a program with these arguments prints its help or version and ends."""
    return not {"-h", "--help", "--version"}.isdisjoint(arguments)

# SPDX-License-Identifier: Apache-2.0
"""Functions that open files by name in native code, past Python's `open`."""

from __future__ import annotations

import importlib.util
import os
import sys
import urllib.parse
from collections.abc import Callable, Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from paceline_plugins.zero.patches import Patches

KEYWORDS = ("f", "filename", "file", "name")
"""Names of arguments that are paths."""
Function = Callable[..., Any]
Mode = str | Callable[[Any, Any], str]
"""As of Python's `open`, or a function of a call's arguments that gives it."""
Rows = Iterable[tuple[Any, str, int, Mode]]
"""Functions: an owner, a name, the place of the path among the arguments, the mode."""
BESIDE = ("-journal", "-wal", "-shm")
"""Ends of the names of files that belong to a database of SQLite."""


def _h5py(args: Any, kwargs: Any) -> str:
    mode = str((args[2] if len(args) > 2 else kwargs.get("mode")) or "r")
    return "x" if mode == "w-" else mode


LATER: dict[str, Callable[[Any], Rows]] = {
    "h5py": lambda h5py: [(h5py.File, "__init__", 1, _h5py)],
    "cv2": lambda cv2: [(cv2, "imwrite", 0, "w"), (cv2, "imread", 0, "r")],
}
"""The same of libraries that a program may import."""


def _loaded() -> Rows:
    script = torch.jit._script.RecursiveScriptModule
    for owner, name in ((torch, "save"), (torch.jit, "save"), (torch.export, "save"), (script, "save")):
        yield owner, name, 1, "w"
    for owner, name in ((torch, "load"), (torch.jit, "load"), (torch.export, "load"), (safetensors, "safe_open")):
        yield owner, name, 0, "r"
    modules: tuple[Any, ...] = (safetensors.torch, safetensors.numpy)
    for module in modules:
        yield module, "save_file", 1, "w"
        yield module, "load_file", 0, "r"
    yield safetensors.torch, "safe_open", 0, "r"


class _Finder(MetaPathFinder):
    """Patches a library of `LATER` after its import."""

    def __init__(self, patch: Callable[[Rows], None]) -> None:
        self._patch, self._waiting = patch, dict(LATER)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        rows = self._waiting.pop(name, None)
        spec = None if rows is None else importlib.util.find_spec(name)
        if rows is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._patch(rows(module))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(patches: Patches, make: Callable[[int, Mode], Callable[[Function], Function]], database: Any) -> None:
    """Patch them by `make(place, mode)`, and `sqlite3.connect` by `database`."""

    def patch(rows: Rows) -> None:
        for owner, name, place, mode in rows:
            patches.replace(owner, name, make(place, mode))

    patch(_loaded())
    for name, rows in LATER.items():
        if name in sys.modules:
            patch(rows(sys.modules[name]))
    finder = _Finder(patch)
    sys.meta_path.insert(0, finder)
    patches.callback(sys.meta_path.remove, finder)
    try:
        import sqlite3
    except ImportError:
        return
    for owner in (sqlite3, sqlite3.dbapi2):
        patches.replace(owner, "connect", database)


def database(given: Any, uri: bool) -> tuple[str, str, str | None] | None:
    """The path of SQLite's file, the mode of opening it, and the query of a URI; None for one in memory."""
    text = os.fsdecode(given) if isinstance(given, (str, bytes, os.PathLike)) else ""
    path, query = text, None
    if uri and text.startswith("file:"):
        found = urllib.parse.urlsplit(text)
        path, query = urllib.parse.unquote(found.path), found.query
    asked = dict(urllib.parse.parse_qsl(query or ""))
    if path in ("", ":memory:") or asked.get("mode") == "memory":
        return None
    reads = asked.get("mode") == "ro" or asked.get("immutable") == "1"
    return path, "r" if reads else "r+" if asked.get("mode") == "rw" else "a", query


def address(path: str, query: str | None) -> str:
    """What `sqlite3.connect` gets for a file."""
    return path if query is None else f"file:{urllib.parse.quote(path)}?{query}"

# SPDX-License-Identifier: Apache-2.0
"""Who called a patched function, and which line of the user's program is running."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import torch

import paceline

# As imported, through links or not: frames' file names begin like this.
PACKAGE = str(Path(paceline.__file__).parent)  # also those of its plugins, which lie beside it: paceline_plugins
TORCH = str(Path(torch.__file__).parent)
PYTHON = os.path.dirname(os.__file__) + os.sep
PLUMBING = ("/tqdm/", "/rich/", "/fastprogress/", "/accelerate/")
"""Libraries that hand on batches: no places in the program, like paceline, torch and Python."""
OURS = ("paceline.", "paceline_plugins.")
"""How the names of paceline's modules begin."""
WRAPPERS = ("paceline_plugins.zero.virtual", "paceline.run.hooks")
"""Modules whose wrappers stand between a caller and a patched function."""


def here(script: Path) -> str:
    """`train.py:31`: the running line of the script; `train.py:31 (net.py:12 from net.py:80)` inside a module."""
    frame, inner = sys._getframe(1), list[str]()
    while frame is not None:
        name = frame.f_code.co_filename
        place = f"{Path(name).name}:{frame.f_lineno}"
        if name == str(script):
            return f"{place} ({' from '.join(inner[:2])})" if inner else place
        if not _is_plumbing(name):
            inner.append(place)
        frame = frame.f_back  # type: ignore[assignment]
    return inner[0] if inner else script.name


def _is_plumbing(file: str) -> bool:
    python = file.startswith(PYTHON) and "-packages" not in file
    return python or file.startswith((PACKAGE, TORCH, "<")) or any(part in file for part in PLUMBING)


def caller(depth: int = 0) -> FrameType:
    """The frame that called the function that asks; with `depth`, that many calls further up."""
    frame = sys._getframe(depth + 2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in WRAPPERS:
        frame = frame.f_back
    return frame


def calling_module(depth: int = 0) -> str:
    """The name of the module of `caller`."""
    return str(caller(depth + 1).f_globals.get("__name__", ""))


def asked_by_paceline() -> bool:
    """Whether the caller's caller is paceline itself, which needs the unpatched result."""
    name = calling_module(1)
    return name.startswith(OURS) and not name.startswith("paceline_plugins.zero")

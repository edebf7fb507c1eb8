# SPDX-License-Identifier: Apache-2.0
"""Who called a patched function, and which line of the user's program is running."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

# As imported, through links or not: frames' file names begin like this.
PACKAGE = str(Path(__file__).parents[2])
TORCH = str(Path(torch.__file__).parent)
WRAPPERS = ("paceline.doors.zero.virtual", "paceline.run.mistakes")
"""Modules whose wrappers stand between a caller and a patched function."""


def here(script: Path) -> str:
    """`train.py:31`: the running line of the script; outside it, the nearest line of user code."""
    frame, nearest = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name == str(script):
            return f"{script.name}:{frame.f_lineno}"
        if not nearest and not name.startswith((PACKAGE, TORCH, "<")):
            nearest = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return nearest or script.name


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
    return name.startswith("paceline.") and not name.startswith("paceline.doors.zero")

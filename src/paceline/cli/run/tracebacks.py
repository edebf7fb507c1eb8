# SPDX-License-Identifier: Apache-2.0
"""Readable tracebacks: frames of libraries folded, equal tracebacks of several workers shown once."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

PACKAGE = str(Path(__file__).parents[2])  # as it was imported, through links or not
LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
BEGINS = "Traceback (most recent call last)"
HOLD_S = 10.0
"""A worker that runs on for so long has caught its error, and the traceback is shown."""
_FRAME = re.compile(r'  File "(.+)", line \d+')
_PACKAGE = re.compile(r"(?:site|dist)-packages/([^/.]+)")


def folded(lines: Sequence[str]) -> list[str]:
    """The traceback with adjacent frames of libraries replaced by one line; unchanged if no frame is the user's."""
    frames, head = _frames(lines)
    if all(_library(frame[0]) for frame in frames):
        return list(lines)
    shown, hidden = list(head), list[str]()
    for frame in [*frames, None]:
        name = None if frame is None else _library(frame[0])
        if name:
            hidden.append(name)
            continue
        if hidden:
            plural = "s" if len(hidden) > 1 else ""
            shown.append(f"  ... {len(hidden)} frame{plural} of {', '.join(dict.fromkeys(hidden))}")
        hidden = []
        shown += frame or []
    return shown


def _frames(lines: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """The lines of each frame, and those before the first."""
    frames, head = list[list[str]](), list[str]()
    for line in lines:
        if _FRAME.match(line):
            frames.append([line])
        else:
            (frames[-1] if frames else head).append(line)
    return frames, head


def _library(first: str) -> str:
    """The library of a frame; "" for the user's code."""
    result = _FRAME.match(first)
    path = result[1] if result else ""
    if path.startswith(PACKAGE):
        return "paceline"
    package = _PACKAGE.search(path)
    if package:
        return package[1]
    return "Python" if path.startswith((*LIBRARY, "<")) else ""


def without_rank(text: str, rank: int) -> str:
    """The text without the worker's own rank."""
    return re.sub(rf"\b(rank|worker|RANK)([ =:]?){rank}\b", r"\1\2N", text)


class HeldTracebacks:
    """Holds tracebacks, and what follows them, back: that of a worker that fails is in the panel at the end, once.

    Args:
        clock: monotonic, seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[int, list[str]] = {}  # rank -> lines
        self._since: dict[int, float] = {}

    def rest(self, rank: int, lines: Sequence[str]) -> list[str]:
        """Those of a worker's new lines that are before a traceback."""
        begins = 0 if rank in self._held else next((i for i, one in enumerate(lines) if one.startswith(BEGINS)), None)
        if begins is None:
            return list(lines)
        self._held.setdefault(rank, []).extend(lines[begins:])
        self._since.setdefault(rank, self._clock())
        return list(lines[:begins])

    def due(self) -> list[int]:
        """Ranks that run on `HOLD_S` after a traceback."""
        return [rank for rank, since in self._since.items() if self._clock() - since > HOLD_S]

    def release(self, rank: int) -> list[str]:
        """The held lines of a worker."""
        self._since.pop(rank, None)
        return self._held.pop(rank, [])

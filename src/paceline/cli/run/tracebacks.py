# SPDX-License-Identifier: Apache-2.0
"""Readable tracebacks: frames of libraries folded, equal tracebacks of several workers shown once."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

PACKAGE = str(Path(__file__).parents[2])  # as it was imported, through links or not
LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
BEGINS = "Traceback (most recent call last)"
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


def ranks_span(ranks: Sequence[int]) -> str:
    """`worker 3`, `workers 0-3`, `workers 0, 2-4`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    text = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"worker{'s' if len(ranks) > 1 else ''} {text}"


class Repeats:
    """Passes a traceback on once; an equal one of another worker becomes one line."""

    def __init__(self) -> None:
        self._open: dict[int, list[str]] = {}  # rank -> an incomplete traceback
        self._first: dict[str, int] = {}  # traceback -> the first rank with it

    def pass_on(self, rank: int, lines: Sequence[str]) -> list[str]:
        """The new lines of a worker's stderr that are to be shown."""
        shown: list[str] = []
        for line in lines:
            block = self._open.get(rank)
            if line.startswith(BEGINS):
                shown += self.rest(rank)
                self._open[rank] = [line]
            elif block is None:
                shown.append(line)
            else:
                block.append(line)
                if line and not line.startswith(" "):
                    shown += self._deduplicated(rank, self._open.pop(rank))
        return shown

    def rest(self, rank: int) -> list[str]:
        """The lines of an incomplete traceback."""
        return self._open.pop(rank, [])

    def _deduplicated(self, rank: int, block: list[str]) -> list[str]:
        first = self._first.setdefault(without_rank("\n".join(block), rank), rank)
        return block if first == rank else [f"{block[-1]}  (the same traceback as worker {first})"]

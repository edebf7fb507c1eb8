# SPDX-License-Identifier: Apache-2.0
"""Messages of zero lines, and the line of the user's program to which they refer."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from paceline.doors.zero.rank_discovery import RankPlace

# As imported, through links or not: frames' file names begin like this.
PACKAGE = str(Path(__file__).parents[2])
VIRTUAL = "paceline.doors.zero.virtual"  # calls a virtual worker's version of a function
BETWEEN = (VIRTUAL, "paceline.run.mistakes")
"""Modules whose wrappers stand between a caller and a function."""
TORCH = str(Path(torch.__file__).parent)


class Words:
    """Prints each message once, on rank 0.

    Args:
        place: this worker.
    """

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """One line on stderr, so that the program's output stays unchanged."""
        if self._place.rank == 0 and text not in self._said:
            self._said.add(text)
            print(f"paceline: {text}", file=sys.stderr, flush=True)

    def once(self, about: str, text: str) -> None:
        """As `say`, once for each `about`, for any text."""
        if about not in self._said:
            self._said.add(about)
            self.say(text)


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


def asked_by_paceline() -> bool:
    """Whether the caller's caller is paceline itself, which needs the unpatched result."""

    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in BETWEEN:
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "")
    return name.startswith("paceline.") and not name.startswith("paceline.doors.zero")

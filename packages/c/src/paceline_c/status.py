# SPDX-License-Identifier: Apache-2.0
"""What the C half gets: a status of `pl_status`, a sentence, and the result."""

from __future__ import annotations

import sys
import traceback
from typing import NamedTuple

import paceline

OK, MORE = 0, 1
INVALID, STATE, REFUSED, MISMATCH, LOST, FILE, PYTHON, INTERNAL, OVER = range(-1, -10, -1)


class Answer(NamedTuple):
    """What a function of the bridge returns; paceline.c reads it as `isLLd`."""

    status: int = OK
    text: str = ""
    first: int = 0
    second: int = 0
    value: float = 0.0


class StateError(Exception):
    """A call at the wrong time."""


KINDS: tuple[tuple[type[BaseException], int], ...] = (
    (paceline.MismatchError, MISMATCH),
    (paceline.DesyncError, MISMATCH),
    (paceline.PeerLostError, LOST),
    (paceline.CheckpointError, FILE),
    (paceline.DataError, FILE),
    (paceline.CacheError, FILE),
    (StateError, STATE),
    (paceline.ClosedError, STATE),
    (paceline.PacelineError, REFUSED),
    (ValueError, INVALID),
    (ImportError, PYTHON),
    (OSError, FILE),
)
"""The first that fits counts; what has none is a mistake of paceline's own."""


def answer_of(error: BaseException) -> Answer:
    """The status and the sentence of an error."""
    if type(error).__name__ == "OverError":  # `attach` came after the end of the run
        return Answer(OVER, plain(f"{error}; this worker has nothing left to do"))
    for kind, status in KINDS:
        if isinstance(error, kind):
            return Answer(status, plain(str(error)))
    traceback.print_exception(error, file=sys.stderr)
    return Answer(INTERNAL, plain(f"{type(error).__name__}: {error} (the traceback is on stderr)"))


def plain(text: str) -> str:
    """Text that C can hold: no NUL, and valid UTF-8."""
    return text.replace("\0", " ").encode("utf-8", "replace").decode("utf-8")

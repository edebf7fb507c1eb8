# SPDX-License-Identifier: Apache-2.0
"""`run.progress` and `run.logger`: what one of several workers says for all."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

T = TypeVar("T")
EVERY_S = 1.0
"""Least time between two reports of a loop."""


class TurnReports:
    """Reports the turns of the outermost loop to the event log, from which `paceline run` and `watch` know the end."""

    def __init__(self, note: Callable[..., None]) -> None:
        self._note, self._at = note, float("-inf")

    def report(self, turn: int, turns: int) -> None:
        """`turn` of `turns` are over; reported at most every `EVERY_S`, and at the end."""
        now = time.monotonic()
        if turns > 0 and (now - self._at >= EVERY_S or turn >= turns):
            self._at = now
            self._note("turn", turn=turn, turns=turns)


def progress(
    note: Callable[..., None], is_main: bool, loop: Iterable[T], total: int | None, **settings: Any
) -> Iterator[T]:
    """The items of a loop, whose turns `note` writes into the event log where their number is known."""
    turns = total if total is not None else len(loop) if isinstance(loop, Sized) else 0
    reports, turn = TurnReports(note), 0
    reports.report(0, turns)
    for turn, item in enumerate(_bar(loop, total, settings) if is_main else loop, start=1):
        yield item
        reports.report(turn, turns)


def _bar(loop: Iterable[T], total: int | None, settings: dict[str, Any]) -> Iterable[T]:
    with contextlib.suppress(ImportError):
        if sys.stderr.isatty():
            loop = importlib.import_module("tqdm.auto").tqdm(loop, total=total, **settings)
    return loop


class MainLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs on the worker that speaks for all, and on no other."""

    def __init__(self, speaks: Callable[[], bool]) -> None:
        super().__init__(logging.getLogger("program"), {})
        self._speaks = speaks

    def isEnabledFor(self, level: int) -> bool:
        """Whether a message of this level is written here."""
        return self._speaks() and super().isEnabledFor(level)

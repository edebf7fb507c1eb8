# SPDX-License-Identifier: Apache-2.0
"""Progress of a LightRNN training: a bar in a terminal, occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.cli.console import err

LINE_EVERY_S = 10.0


class Shown:
    """Displays progress; may be called from another thread.

    Args:
        console: for lines.
        bar: a bar in a terminal; None elsewhere.
    """

    def __init__(self, console: Console, bar: Progress | None) -> None:
        self._console, self._bar = console, bar
        self._what = ""
        self._task = bar.add_task("", total=None, note="", visible=False) if bar is not None else None
        self._told = time.monotonic()

    def doing(self, what: str, done: float, total: float, note: str = "") -> None:
        """Progress."""
        if self._bar is not None and self._task is not None:
            if what != self._what:
                self._bar.reset(self._task, total=total, description=what, visible=True)
                self._what = what
            self._bar.update(self._task, completed=done, total=total, description=what, note=note)
        elif time.monotonic() - self._told > LINE_EVERY_S:
            self._told = time.monotonic()
            share = f"{100 * min(1.0, done / total):.0f} %" if total > 0 else ""
            self.say(" ".join(part for part in (f"{what}:", share, note) if part))

    def say(self, text: str) -> None:
        """A message."""
        self._console.print(text, markup=False, soft_wrap=True)


@contextlib.contextmanager
def shown() -> Iterator[Shown]:
    """Context with a display."""
    console = err()
    if not console.is_terminal:
        yield Shown(console, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    rest = (TextColumn("{task.fields[note]}"), TimeRemainingColumn(compact=True))
    with Progress(*columns, *rest, console=console, transient=True) as bar:
        yield Shown(console, bar)

# SPDX-License-Identifier: Apache-2.0
"""Progress of a training of a pair, and the live view of both directions.

`with paceline_dual.shown() as show` gives a view: a live table on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

LINE_EVERY_S = 10.0
"""Seconds between two lines without a terminal."""
ROWS = 12
"""Newest evaluations in the table."""
BARS = "▁▂▃▄▅▆▇█"
Row = dict[str, Any]


class Show(Protocol):
    """Displays the progress of a training; on worker 0 only."""

    def doing(self, what: str, done: float, total: float, note: str = "") -> None:
        """Progress; may be called often."""

    def row(self, row: Row) -> None:
        """An evaluation was made: a row of the history."""

    def say(self, text: str) -> None:
        """A message."""


class Silent:
    """Displays nothing."""

    def doing(self, what: str, done: float, total: float, note: str = "") -> None:
        """Nothing."""

    def row(self, row: Row) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""


class Lines:
    """Plain lines, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console, self._told = console, time.monotonic()

    def doing(self, what: str, done: float, total: float, note: str = "") -> None:
        """A line now and then."""
        if time.monotonic() - self._told > LINE_EVERY_S:
            self._told = time.monotonic()
            self.say(" ".join(part for part in (f"{what}: {done:,.0f} of {total:,.0f}", note) if part))

    def row(self, row: Row) -> None:
        """A line for each."""
        self.say(line_of(row))

    def say(self, text: str) -> None:
        """A line."""
        self._console.print(text, markup=False, soft_wrap=True)


class OnTerminal:
    """A bar and the table of evaluations, updated in place.

    Args:
        console: a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._rows = console, list[Row]()
        done = TextColumn("{task.completed:,.0f} of {task.total:,.0f}")
        rest = (done, TextColumn("{task.fields[note]}"), TimeRemainingColumn(compact=True))
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), *rest, console=console)
        self._task = self._bar.add_task("", total=0, note="")

    def doing(self, what: str, done: float, total: float, note: str = "") -> None:
        """The bar."""
        self._bar.update(self._task, description=what, completed=done, total=total, note=note)

    def row(self, row: Row) -> None:
        """A row of the table."""
        self._rows.append(row)

    def say(self, text: str) -> None:
        """A line above all."""
        self._console.print(text, markup=False, soft_wrap=True)

    def __rich__(self) -> RenderableType:
        return Group(*([view(self._rows, self._console.width)] if self._rows else []), self._bar)


@contextlib.contextmanager
def shown(console: Console | None = None) -> Iterator[Lines | OnTerminal]:
    """Context with a display of a training; on standard error by default."""
    console = Console(stderr=True, highlight=False) if console is None else console
    if not console.is_terminal:
        yield Lines(console)
        return
    show = OnTerminal(console)
    with Live(show, console=console, refresh_per_second=4):
        yield show


# -- drawing ---------------------------------------------------------------------------------------


def view(rows: Sequence[Row], width: int) -> RenderableType:
    """Both directions' scores and rewards and the constraint's gap: the newest rows, and curves.

    The curves leave out the evaluation before the first step, whose values would dominate the scale.
    """
    narrow = width < 100
    table = Table(box=None, pad_edge=False, padding=(0, 1 if narrow else 2, 0, 0))
    for name in _names(narrow):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows[-ROWS:]:
        table.add_row(*_cells(row, narrow))
    curves = [
        Text.assemble(f"{name:<15}", (sparkline(values, max(8, min(60, width - 40))), "cyan"), f"  {_ends(values)}")
        for name, values in _curves([row for row in rows if row["step"]])
        if len(values) > 1
    ]
    return Group(table, *([Text("")] if curves else []), *curves)


def line_of(row: Row) -> str:
    """An evaluation in a line."""
    parts = [f"step {row['step']:,}"]
    for name, arrow in (("forward", "x -> y"), ("backward", "y -> x")):
        exact = _exact(row, name)
        reward = _reward(row, name)
        parts.append(
            f"{arrow} log P {number(row[name])}"
            + (f", exact {exact}" if exact else "")
            + (f", reward {reward}" if reward else "")
        )
    parts.append(f"gap {number(row['gap'])} (rms {number(row['gap_rms'])})")
    return " | ".join(parts)


def number(value: float | None) -> str:
    """A number with four significant digits."""
    if value is None or not math.isfinite(value):
        return "" if value is None else str(value)
    return f"{value:.4g}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as at most `width` bars, scaled to the finite values."""
    if len(values) > width:
        cuts = [k * len(values) // width for k in range(width + 1)]
        values = [sum(values[low:high]) / (high - low) for low, high in pairwise(cuts)]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if math.isfinite(value) else "!" for value in values)


def _names(narrow: bool) -> list[str]:
    both = ["log P", "exact", "reward"]
    marks = ("y|x", "x|y") if narrow else ("x -> y", "y -> x")
    return ["step", *(f"{mark} {name}" for mark in marks for name in both), "gap", *([] if narrow else ["gap rms"])]


def _cells(row: Row, narrow: bool) -> list[str]:
    cells = [f"{row['step']:,}"]
    for name in ("forward", "backward"):
        cells += [number(row[name]), _exact(row, name), _reward(row, name)]
    return [*cells, number(row["gap"]), *([] if narrow else [number(row["gap_rms"])])]


def _curves(rows: Sequence[Row]) -> list[tuple[str, list[float]]]:
    names = (("forward", "log P(y|x)"), ("backward", "log P(x|y)"), ("gap", "|gap|"))
    found = [(label, [row[name] for row in rows if row[name] is not None]) for name, label in names]
    for name, arrow in (("forward", "x -> y"), ("backward", "y -> x")):
        found.append((f"reward {arrow}", [row["rewards"][name]["r"] for row in rows if row["rewards"][name]]))
    return found


def _ends(values: Sequence[float]) -> str:
    return f"{number(values[0])} to {number(values[-1])}"


def _exact(row: Row, name: str) -> str:
    share = row[f"exact_{name}"]
    return "" if share is None else f"{100 * share:.1f} %"


def _reward(row: Row, name: str) -> str:
    found = row["rewards"][name]
    return number(found["r"]) if found else ""

# SPDX-License-Identifier: Apache-2.0
"""Watches a running training of a pair from any terminal that sees its folder."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from paceline_dual.report import History
from paceline_dual.show import line_of, view

POLL_EVERY_S = 1.0


def watch(folder: Path, once: bool, console: Console) -> None:
    """Show the history and update it until the training is over; a missing history is an error."""
    history = History.load(folder)
    if once or history.over:
        console.print(page(folder, history, console.width))
        return
    try:
        (_on_terminal if console.is_terminal else _in_lines)(folder, history, console)
    except KeyboardInterrupt:
        return


def page(folder: Path, history: History, width: int) -> RenderableType:
    """A title with the progress, and the table of evaluations."""
    done = "over" if history.over else f"evaluated at step {history.rows[-1]['step']:,} of {history.steps:,}"
    workers = f"{history.workers} worker{'s' if history.workers > 1 else ''}"
    parts = [folder.resolve().name, history.method, workers, *([history.rule] if history.workers > 1 else []), done]
    title = Text(" | ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")
    return Group(title, view(history.rows, width))


def _on_terminal(folder: Path, history: History, console: Console) -> None:
    with Live(page(folder, history, console.width), console=console, refresh_per_second=4) as screen:
        while not history.over:
            time.sleep(POLL_EVERY_S)
            history = History.load(folder)
            screen.update(page(folder, history, console.width))


def _in_lines(folder: Path, history: History, console: Console) -> None:
    """Without a terminal: a line for each evaluation."""
    told = -1
    while True:
        for row in history.rows:
            if row["step"] > told:
                told = row["step"]
                console.print(line_of(row), soft_wrap=True, markup=False)
        if history.over:
            return
        time.sleep(POLL_EVERY_S)
        history = History.load(folder)

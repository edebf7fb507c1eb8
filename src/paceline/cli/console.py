# SPDX-License-Identifier: Apache-2.0
"""Where the commands print, and how they refuse."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.segment import Segment
from rich.text import Text

from paceline.core.printable import CONTROL, visible
from paceline.errors import PacelineError

PIPE_COLUMNS = 4096
USAGE = 2  # exit code of a command that was asked for something that cannot be


class _Safe(Console):
    """Shows no control character but its own, wherever the text came from."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See rich."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield Segment(visible(text), style) if control is None and CONTROL.search(text) else segment


def out() -> Console:
    """Results. Made anew for each command, because tests and pipes change stdout; in a pipe no line is cut in two."""
    console = _Safe(highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = PIPE_COLUMNS
    return console


def err() -> Console:
    """Errors and notes, which must not end up in a file that collects results."""
    return _Safe(stderr=True, highlight=False)


def error_panel(title: str, *parts: RenderableType) -> Panel:
    """The one shape of an error."""
    return Panel(Group(*parts), title=Text(title, style="bold"), title_align="left", style="red")


def refuse(message: str) -> NoReturn:
    """Say what is wrong with the command, and end with exit code 2."""
    err().print(error_panel("error", Text(message, style="default")))
    raise typer.Exit(USAGE)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """What is wrong with the wish is said in a sentence."""
    try:
        yield
    except PacelineError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{error}; can files be written and read there?")


def near(path: Path) -> str:
    """A path as one would type it here: relative where it lies below, absolute elsewhere."""
    shown = os.path.relpath(path)
    return str(path) if shown.startswith("..") else shown

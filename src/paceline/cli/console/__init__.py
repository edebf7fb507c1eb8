# SPDX-License-Identifier: Apache-2.0
"""The consoles of the commands, and how they refuse a call."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.segment import Segment
from rich.text import Text

from paceline.errors import PacelineError
from paceline.observe.printable import CONTROL, visible

PIPE_COLUMNS = 4096
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
USAGE = 2  # exit code of an invalid command line


class _Safe(Console):
    """Makes control characters in printed text visible."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See rich."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield Segment(visible(text), style) if control is None and CONTROL.search(text) else segment


def out() -> Console:
    """A console for results. A new one for each command, because tests change stdout; a pipe gets unbroken lines."""
    console = _Safe(highlight=False, markup=False, emoji=False)
    if console.is_terminal or os.environ.get("COLUMNS"):
        return console
    return _Safe(width=PIPE_COLUMNS, highlight=False, markup=False, emoji=False)


def err() -> Console:
    """A console for errors and notes, on stderr."""
    return _Safe(stderr=True, highlight=False, markup=False, emoji=False)


def error_panel(title: str, *parts: RenderableType) -> Panel:
    """The panel around an error message."""
    return Panel(Group(*parts), title=Text(title, style="bold"), title_align="left", style="red")


def command_app(function: Callable[..., None], **settings: Any) -> typer.Typer:
    """An app with one command, for an entry point; `settings` are those of `typer.Typer.command`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(**settings)(function)
    return app


def refuse(message: str) -> NoReturn:
    """Print why the command cannot run, and end with exit code 2."""
    err().print(error_panel("error", Text(message, style="default")))
    raise typer.Exit(USAGE)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Print why the options are invalid, and exit."""
    try:
        yield
    except PacelineError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{error}; can files be written and read there?")


def without_secrets(text: str) -> str:
    """The text with `INVITATION` for each invitation to a run."""
    return re.sub(r"paceline-[\w-]{40,}", "INVITATION", text)


def near(path: Path) -> str:
    """A path for messages: relative below the current directory, else absolute."""
    shown = os.path.relpath(path)
    return str(path) if shown.startswith("..") else shown


def parse_count(text: str, option: str = "--parameters") -> int:
    """`25M` is 25,000,000."""
    match = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kmbgt]?)\s*", text.lower())
    count = round(float(re.sub("[_,]", "", match[1])) * UNITS[match[2]]) if match else 0
    if count < 1:
        refuse(f"{option} must be a number such as 250000, 25M or 1.3B, got {text!r}")
    return count

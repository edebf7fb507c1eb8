# SPDX-License-Identifier: Apache-2.0
"""`paceline dual`: look at a training of two opposite models, while it runs and afterwards.

torch loads for seconds, so that what needs it is imported inside the commands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import PacelineError

from .console import out, refuse

app = typer.Typer(
    help="Two opposite tasks that teach each other (dual learning): watch a training, report on it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a training.", show_default=False)]


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What is wrong with the wish is said in a sentence."""
    try:
        yield
    except PacelineError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{error}; can files be written and read there?")


@app.command("watch")
def watch(
    folder: Folder,
    once: Annotated[bool, typer.Option("--once", help="Print one view and end, for scripts.")] = False,
) -> None:
    """Watch both directions' scores, rewards and the constraint's gap, until the training is over."""
    with _refusing():
        from . import dual_watch

        dual_watch.watch(folder, once, out())


@app.command("report")
def report(
    folder: Folder,
    words: Annotated[
        Path | None, typer.Option(help="Words of both sides, as Words.save writes them; default: DIR/words.json.")
    ] = None,
) -> None:
    """Write the report of a training: DIR/report.html, one file that needs nothing else."""
    with _refusing():
        from .dual_report import write_page

        page = write_page(folder, words)
    out().print(f"report: {page}", soft_wrap=True, markup=False)

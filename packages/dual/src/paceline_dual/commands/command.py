# SPDX-License-Identifier: Apache-2.0
"""`paceline dual`: look at a training of two opposite models, while it runs and afterwards.

torch loads for seconds, so that what needs it is imported inside the commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import out, refusing

app = typer.Typer(
    help="Two opposite tasks that teach each other (dual learning): watch a training, report on it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a training.", show_default=False)]


@app.command("watch")
def watch(
    folder: Folder,
    once: Annotated[bool, typer.Option("--once", help="Print one view and end, for scripts.")] = False,
) -> None:
    """Watch both directions' scores, rewards and the constraint's gap, until the training is over."""
    with refusing():
        from paceline_dual.commands import watch as watching

        watching.watch(folder, once, out())


@app.command("report")
def report(
    folder: Folder,
    words: Annotated[
        Path | None, typer.Option(help="Words of both sides, as Words.save writes them; default: DIR/words.json.")
    ] = None,
) -> None:
    """Write the report of a training: DIR/report.html, one file that needs nothing else."""
    with refusing():
        from paceline_dual.commands.report import write_page

        page = write_page(folder, words)
    out().print(f"report: {page}", soft_wrap=True, markup=False)

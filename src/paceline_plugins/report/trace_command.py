# SPDX-License-Identifier: Apache-2.0
"""`paceline trace`: the logs of a run as one timeline of all workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import command_app, out, refusing


def command(
    directory: Annotated[Path, typer.Argument(help="Log directory of a run.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write; one that ends with .gz is compressed.")
    ] = Path("trace.json"),
) -> None:
    """Write a timeline of all workers on one clock, to be opened at https://ui.perfetto.dev or chrome://tracing."""
    from paceline_plugins.report.trace import write_trace  # slow to import

    with refusing():
        trace = write_trace(directory, output)
    out().print(f"{trace.workers} workers, {trace.slices:,} spans; clocks: {trace.clock}", markup=False)
    if trace.folded > 1:
        out().print(
            f"the log is long: each span stands for {trace.folded} lines; write_trace(since_s=, until_s=) shows a part"
        )
    out().print(f"trace: {trace.path}", soft_wrap=True, markup=False)


app = command_app(command)

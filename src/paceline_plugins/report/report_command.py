# SPDX-License-Identifier: Apache-2.0
"""`paceline report`: a page with pictures, and a short table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from paceline.cli.console import command_app, err, near, out, refuse
from paceline.cli.run.checks import LOGS
from paceline.cli.watch import newest_run
from paceline.errors import PacelineError
from paceline.extensions import REMARKS, extension
from paceline.observe.reports.log import RunLog
from paceline_plugins.report.tables import comparison, event_rows
from paceline_plugins.report.totals import warnings

LATEST = 20
"""Events of an elastic run that are shown in the terminal."""


def command(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            help=f"Log directory of a run, or its parent: the newest run there; {LOGS} by default. Several: compared.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Directory for the page; the run's own, or ./report for several runs.", show_default=False),
    ] = None,
) -> None:
    """Make a page with figures from the logs of one run, or compare several."""
    from paceline_plugins.report.report import load, write_runs  # slow to import

    places = [newest_run(directory) for directory in directories or [Path(LOGS)]]
    output = output or (places[0] / "report" if len(places) == 1 else Path("report"))
    try:
        runs = load(places)
    except PacelineError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"cannot read the logs: {error}")
    try:
        page = write_runs(runs, output)
    except PacelineError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"cannot write the report to {output}: {error}; choose another --output")
    out().print(as_table(comparison(runs)))
    for run in runs:
        for told in _forecast(run):
            out().print(f"{run.label}: {told}" if len(runs) > 1 else told, markup=False)
    for run in runs:
        if run.events:
            out().print(_events(run))
    for turn, text in enumerate(_notes(runs)):
        err().print(f"{'problem' if len(runs) == 1 and not turn else 'note'}: {text}", markup=False)
    out().print(f"report: {near(page)}", soft_wrap=True, markup=False)


def _forecast(run: RunLog) -> list[str]:
    """A sentence on other numbers of workers, where the log tells enough."""
    try:
        return [extension(REMARKS, "forecast")(run).sentence]
    except PacelineError:
        return []


def as_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """A column for each run, since a terminal is narrow."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(Text(row["run"]), justify="right", overflow="fold")
    for name in dict.fromkeys(key for row in rows for key in row if key != "run"):
        table.add_row(Text(name), *(Text(row.get(name, "")) for row in rows))
    return table


def _events(run: RunLog) -> Table:
    """The latest events of an elastic run; the page has more."""
    table = Table("after", "event", "what", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in event_rows(run, LATEST):
        table.add_row(*(Text(text) for text in row.values()))
    return table


def _notes(runs: Sequence[RunLog]) -> list[str]:
    many = len(runs) > 1
    return [f"{run.label}: {text}" if many else text for run in runs for text in warnings(run)]


app = command_app(command)

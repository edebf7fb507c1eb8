# SPDX-License-Identifier: Apache-2.0
"""`write_report`: the logs of one run or of several, as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.observe.reports.log import RunLog
from paceline.observe.reports.read import read_runs
from paceline_plugins.report.chart_page import document
from paceline_plugins.report.charts import charts
from paceline_plugins.report.sections import ExtraTable, Shown, sections


def write_report(
    directories: str | Path | Sequence[str | Path],
    output: str | Path = "report",
    *,
    title: str | None = None,
    extra: ExtraTable | None = None,
) -> Path:
    """Write `output/index.html`; returns its path.

    Args:
        directories: log directory of a run, or several to compare; a directory's name is its label.
        output: directory of the page, made where it does not exist; or the page itself, `*.html`.
        title: of the page; by default the labels of the runs.
        extra: the caller's own table for the top.
    """
    return write_runs(load(directories), output, title=title, extra=extra)


def write_runs(
    runs: list[RunLog],
    output: str | Path,
    *,
    title: str | None = None,
    extra: ExtraTable | None = None,
) -> Path:
    """As `write_report`, for runs that were read already."""
    html = Path(output)
    if html.suffix != ".html":
        html = html / "index.html"
    html.parent.mkdir(parents=True, exist_ok=True)
    shown, drawn = Shown(title or title_of(runs), extra), charts(runs)
    html.write_text(document(shown.title, sections(runs, drawn, shown), drawn, {}), encoding="utf-8")
    return html


def load(directories: str | Path | Sequence[str | Path]) -> list[RunLog]:
    """The runs of one directory or of several, with labels that differ."""
    given = [directories] if isinstance(directories, str | Path) else list(directories)
    runs = [run for directory in given for run in read_runs(directory)]
    labels = [run.label for run in runs]
    for run in runs:
        if labels.count(run.label) > 1:
            run.label = str(run.directory) + (f" ({run.number})" if run.number > 1 else "")
    return runs


def title_of(runs: Sequence[RunLog]) -> str:
    """The labels of the runs, or how many there are."""
    if len(runs) == 1:
        return f"Run {runs[0].label}"
    return f"{len(runs)} runs compared" if len(runs) > 4 else " · ".join(run.label for run in runs)

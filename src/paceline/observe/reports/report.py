# SPDX-License-Identifier: Apache-2.0
"""`write_report`: the logs of one run or of several, as one HTML page.

The page is one file that needs no network; the figures are also written beside it as PNG.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.observe.reports import figures, page
from paceline.observe.reports.log import RunLog
from paceline.observe.reports.read import read_runs
from paceline.observe.reports.summary import data_wait_sentence, summarize, value_text, waits_long_for_data, warnings
from paceline.observe.reports.tables import (
    asynchronous_facts,
    comparison,
    event_rows,
    facts,
    source_facts,
    tuned_rows,
    worker_rows,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[Sequence[RunLog]], "Figure | None"]

WAITING = "Waiting is for the slowest worker to arrive at the exchange; exchanging follows."
SOURCES = (
    "A hit was in the cache when it was opened, a miss had to be fetched. Waited is the time of opening, summed over "
    "all loader processes: while other processes have batches, the device goes on. Corrupt files were fetched again."
)
EVENTS = (
    "Events of the control plane and the launcher, in time since the first worker began. The number of a worker is "
    "never used twice."
)
WAITING_OF_ASYNCHRONOUS = (
    "Asynchronous workers wait for late answers and, under a bounded staleness, for the slowest worker."
)

FIGURES: tuple[tuple[str, str, str, Draw], ...] = (
    (
        "loss-by-samples",
        "Loss by samples",
        "Does the rule learn as much from each sample, whatever the number of workers? "
        "Pale: as reported. Bold: running mean.",
        figures.loss_by_samples,
    ),
    (
        "loss-by-time",
        "Loss by time",
        "Does the run reach a loss sooner? Times are those of this machine.",
        figures.loss_by_time,
    ),
    (
        "time-per-worker",
        "Where the time went",
        WAITING,
        figures.time_per_worker,
    ),
    (
        "data-over-time",
        "Waiting for data",
        "Share of the time in which a worker had no batch. Waiting at the start only means that a cache fills; "
        "waiting that goes on means that the source or the loader is too slow.",
        figures.data_over_time,
    ),
    (
        "effective-workers",
        "Effective workers",
        "How many workers they are worth: 1 where all find the same in a block, N where what they find is independent. "
        "More workers pay where this is near their number.",
        figures.effective_over_time,
    ),
    ("bytes-over-time", "Bytes sent", "By all workers together.", figures.bytes_over_time),
    (
        "delay-of-pushes",
        "Delay of pushes",
        "The delay of a push is the number of updates between the version of the parameters at which it was computed "
        "and the version to which it was applied; 0 is as with one worker. "
        f"Up to {figures.RARE} % of the pushes, with far greater delays, may lie to the right of the figure.",
        figures.delay_of_pushes,
    ),
)


@dataclass(frozen=True)
class ExtraTable:
    """The caller's own table, at the top of the page."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    note: str = ""


def write_report(
    directories: str | Path | Sequence[str | Path],
    output: str | Path = "report",
    *,
    title: str | None = None,
    extra: ExtraTable | None = None,
    debug: bool = False,
) -> Path:
    """Write `output/index.html` and its pictures; returns the page's path.

    Args:
        directories: log directory of a run, or several to compare; a directory's name is its label.
        output: directory of the page, made where it does not exist; or the page itself, `*.html`.
        title: of the page; by default the labels of the runs.
        extra: the caller's own table for the top.
        debug: whether to list every event of elastic runs.
    """
    return write_runs(load(directories), output, title=title, extra=extra, debug=debug)


def write_runs(
    runs: list[RunLog],
    output: str | Path,
    *,
    title: str | None = None,
    extra: ExtraTable | None = None,
    debug: bool = False,
) -> Path:
    """As `write_report`, for runs that were read already."""
    html = Path(output)
    if html.suffix != ".html":
        html = html / "index.html"
    html.parent.mkdir(parents=True, exist_ok=True)
    name = title or _title(runs)
    drawn = draw_all(runs)  # first: without matplotlib nothing is written
    html.write_text(page.whole_page(name, _body(runs, name, drawn, extra, debug)), encoding="utf-8")
    for stem, caption, _, figure in drawn:
        page.save_png(figure, html.parent / f"{stem}.png", f"{caption}: {name}")
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


def draw_all(runs: Sequence[RunLog]) -> list[tuple[str, str, str, Figure]]:
    """Every figure for which the logs have data: file stem, title, caption, figure."""
    drawn = []
    for stem, title, caption, draw in FIGURES:
        figure = draw(runs)
        if caption is WAITING:
            caption = _waiting(runs)
        if figure is not None:
            drawn.append((stem, title, caption, figure))
    return drawn


def _waiting(runs: Sequence[RunLog]) -> str:
    """The caption for waiting: of synchronous rules, of asynchronous rules, or both where they are compared."""
    pushed = [bool(run.delays) for run in runs]
    return " ".join(([] if all(pushed) else [WAITING]) + ([WAITING_OF_ASYNCHRONOUS] if any(pushed) else []))


def _body(
    runs: list[RunLog],
    name: str,
    drawn: list[tuple[str, str, str, Figure]],
    extra: ExtraTable | None,
    debug: bool,
) -> list[str]:
    parts = [f"<h1>{escape(name)}</h1>", _lead(runs)]
    if extra is not None:
        parts += [page.heading(extra.title), page.table(extra.rows, extra.note)]
    if len(runs) == 1:
        parts += _one_run(runs[0])
    else:
        parts += [page.heading("Comparison"), page.table(comparison(runs, pushes=False))]
        parts += _pushes(runs)
        notes = [f"{run.label}: {text}" for run in runs for text in warnings(run)]
        parts += [page.warning_box(notes)]
    parts += _sources(runs)
    for run in runs:
        rows = tuned_rows(run)
        parts += [page.heading(f"Changes of settings in {run.label}"), page.table(rows)] if rows else []
    parts.append(page.heading("Figures") if drawn else "")
    for number, (_, title, caption, figure) in enumerate(drawn):
        parts.append(page.figure_block(figure, title, caption, number))
    for run in runs:
        of_run = f" of {run.label}" if len(runs) > 1 else ""
        parts += [page.heading(f"Workers{of_run}"), page.table(worker_rows(run))]
        parts += _events(run, f"Events{of_run}", debug)
    parts.append(_footer(runs))
    return parts


def _pushes(runs: list[RunLog]) -> list[str]:
    """A separate table, since only some runs have these columns."""
    shown = [(run.label, asynchronous_facts(summarize(run))) for run in runs]
    rows = [{"run": label, **facts} for label, facts in shown if facts]
    return [page.heading("Pushes and lost workers"), page.table(rows)] if rows else []


def _events(run: RunLog, title: str, debug: bool) -> list[str]:
    """A table of the events of an elastic run."""
    rows = event_rows(run, debug=debug)
    return [page.heading(title), page.table(rows, EVENTS)] if rows else []


def _sources(runs: list[RunLog]) -> list[str]:
    """A table of the reads of each source, in runs with a cache."""
    rows = [
        ({"run": run.label} if len(runs) > 1 else {}) | {"source": name} | source_facts(counts)
        for run in runs
        for name, counts in run.sources.items()
    ]
    return [page.heading("Sources of data"), page.table(rows, SOURCES)] if rows else []


def _one_run(run: RunLog) -> list[str]:
    numbers = summarize(run)
    last = {f"last {name}": value_text(value) for name, value in numbers.values.items()}
    data_wait = "" if waits_long_for_data(run) else data_wait_sentence(run)  # otherwise it is among the warnings
    return [page.warning_box(warnings(run)), page.cards(last | facts(numbers)), page.note(data_wait)]


def _title(runs: list[RunLog]) -> str:
    if len(runs) == 1:
        return f"Run {runs[0].label}"
    return f"{len(runs)} runs compared" if len(runs) > 4 else " · ".join(run.label for run in runs)


def _lead(runs: list[RunLog]) -> str:
    if len(runs) > 1:
        return '<p class="lead">Event logs of several runs, side by side.</p>'
    run = runs[0]
    hosts = f"{len(run.hosts)} hosts ({', '.join(run.hosts)})" if len(run.hosts) > 1 else run.hosts[0]
    parameters = "" if run.parameters is None else f" {run.parameters:,} parameters,"
    count = f"{run.size} worker{'s' if run.size > 1 else ''}"
    if run.elastic and len(run.numbers) != run.size:
        count = f"at most {count} at a time, {len(run.numbers)} in all,"
    text = f"{count} on {hosts},{parameters} {run.transport}"
    why = f'<p class="note">{escape(run.why)}</p>' if run.why else ""
    return f'<p class="lead"><code>{escape(run.rule)}</code> {escape(text)}</p>{why}'


def _footer(runs: list[RunLog]) -> str:
    started = [run.started_unix_s for run in runs if run.started_unix_s is not None]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(started))) if started else "unknown"
    versions = ", ".join(dict.fromkeys(run.version for run in runs))
    return (
        "<footer>Last values are means over the last twentieth of each worker's reports. "
        f"Started {escape(when)}. Logs written by paceline {escape(versions)}.</footer>"
    )

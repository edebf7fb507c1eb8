# SPDX-License-Identifier: Apache-2.0
"""The sections of a run's page: numbers, warnings, charts, workers and events, or several runs side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from paceline.observe.reports.log import RunLog
from paceline.observe.reports.summary import seconds_text
from paceline_plugins.report import page
from paceline_plugins.report.chart_page import chart_section, time_bars
from paceline_plugins.report.charts import Chart
from paceline_plugins.report.tables import (
    asynchronous_facts,
    comparison,
    event_rows,
    facts,
    tiles,
    tuned_rows,
    worker_rows,
)
from paceline_plugins.report.totals import summarize, warnings

WAITING = "Waiting is for the slowest worker to arrive at the exchange; exchanging follows."
WAITING_OF_ASYNCHRONOUS = (
    "Asynchronous workers wait for late answers and, under a bounded staleness, for the slowest worker."
)
EVENTS = "In time since the first worker began. The number of a worker is never used twice."


@dataclass(frozen=True)
class ExtraTable:
    """The caller's own table, at the top of the page."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    note: str = ""


@dataclass(frozen=True)
class Shown:
    """What the page shows beside the logs."""

    title: str  # of the page
    extra: ExtraTable | None = None  # the caller's own table
    states: Mapping[int, str] | None = None  # of a run that still trains, worker -> its state


def sections(runs: Sequence[RunLog], drawn: Sequence[Chart], shown: Shown) -> dict[str, str]:
    """Key -> HTML, in the order of the page, without empty ones."""
    return {key: html for key, html in _sections(runs, drawn, shown) if html}


def _sections(runs: Sequence[RunLog], drawn: Sequence[Chart], shown: Shown) -> Iterator[tuple[str, str]]:
    yield "head", f"<h1>{escape(shown.title)}</h1>{_lead(runs)}"
    if shown.extra is not None:
        yield "extra", page.heading(shown.extra.title) + page.table(shown.extra.rows, shown.extra.note)
    notes = [(run, warnings(run, at_work=shown.states is not None)) for run in runs]
    if len(runs) == 1:
        yield "problem", page.warning_box(notes[0][1][:1], "The log shows no problem.")
        yield "tiles", page.cards(tiles(runs[0]))
        notes = [(runs[0], [*notes[0][1][1:], *filter(None, [runs[0].why])])]
    else:
        yield from _several(runs)
    for chart in drawn:
        yield f"chart-{chart.key}", chart_section(chart)
    yield "times", time_bars(_times(runs), _waiting(runs))
    texts = [f"{run.label}: {text}" if len(runs) > 1 else text for run, told in notes for text in told]
    yield "notes", page.heading("Notes") + page.warning_box(texts) if texts else ""
    if len(runs) == 1:
        rows = [{"number": name, "value": value} for name, value in facts(runs[0]).items()]
        yield "numbers", _titled("Numbers", rows)
    for number, run in enumerate(runs):
        of_run = f" of {run.label}" if len(runs) > 1 else ""
        yield f"tuned-{number}", _titled(f"Changes of settings{of_run}", tuned_rows(run))
        yield f"workers-{number}", _titled(f"Workers{of_run}", worker_rows(run, shown.states))
        yield f"events-{number}", _titled(f"Events{of_run}", event_rows(run), EVENTS)
    yield "footer", _footer(runs)


def _titled(title: str, rows: Sequence[Mapping[str, Any]], note: str = "") -> str:
    return page.heading(title) + page.table(rows, note) if rows else ""


def _several(runs: Sequence[RunLog]) -> Iterator[tuple[str, str]]:
    yield "comparison", _titled("Comparison", comparison(runs, pushes=False))
    pushed = [(run.label, asynchronous_facts(summarize(run))) for run in runs]  # only some runs have these columns
    yield "pushes", _titled("Pushes and lost workers", [{"run": label, **told} for label, told in pushed if told])


def _times(runs: Sequence[RunLog]) -> list[tuple[str, dict[str, float], str]]:
    """Seconds of each worker, or when comparing of the mean worker of each run, by part."""
    rows = []
    for run in runs:
        own = [(f"worker {w.rank}", (w.compute_s, w.data_s, w.wait_s, w.exchange_s)) for w in run.workers]
        if len(runs) > 1:
            columns = zip(*(times for _, times in own), strict=True)
            own = [(run.label, tuple(sum(column) / len(own) for column in columns))]
        rows += own
    parts = ("compute", "data", "wait", "exchange")
    return [(label, dict(zip(parts, times, strict=True)), seconds_text(sum(times))) for label, times in rows]


def _waiting(runs: Sequence[RunLog]) -> str:
    """The caption for waiting: of synchronous rules, of asynchronous rules, or both where they are compared."""
    pushed = [bool(run.delays) for run in runs]
    whose = ["A bar is the mean worker of a run."] if len(runs) > 1 else []
    return " ".join(whose + ([] if all(pushed) else [WAITING]) + ([WAITING_OF_ASYNCHRONOUS] if any(pushed) else []))


def _lead(runs: Sequence[RunLog]) -> str:
    if len(runs) > 1:
        return '<p class="lead">Event logs of several runs, side by side.</p>'
    run = runs[0]
    hosts = f"{len(run.hosts)} hosts ({', '.join(run.hosts)})" if len(run.hosts) > 1 else run.hosts[0]
    parameters = "" if run.parameters is None else f" {run.parameters:,} parameters,"
    count = f"{run.size} worker{'s' if run.size > 1 else ''}"
    if run.elastic and len(run.numbers) != run.size:
        count = f"at most {count} at a time, {len(run.numbers)} in all,"
    text = f"{count} on {hosts},{parameters} {run.transport}"
    return f'<p class="lead"><code>{escape(run.rule)}</code> {escape(text)}</p>'


def _footer(runs: Sequence[RunLog]) -> str:
    started = [one.attach["unix_s"] for run in runs for one in run.workers if "unix_s" in one.attach]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(started))) if started else "unknown"
    versions = ", ".join(dict.fromkeys(run.version for run in runs))
    return (
        "<footer>Last values are means over the last twentieth of each worker's reports. "
        f"Started {escape(when)}. Logs written by paceline {escape(versions)}.</footer>"
    )

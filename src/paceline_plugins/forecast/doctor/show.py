# SPDX-License-Identifier: Apache-2.0
"""The findings on the terminal, as a figure, as a page, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.observe.reports.summary import seconds_text
from paceline_plugins.forecast.doctor.finding import Finding, latency_text, rate_text
from paceline_plugins.forecast.doctor.judge import exchange_s, fit, slowest_bytes_s
from paceline_plugins.forecast.doctor.measured import MeasuredLink, Measurements
from paceline_plugins.report import page
from paceline_plugins.report.canvas import new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_COLUMNS = 12  # of a table on the terminal
STYLES = {"wrong": "bold red", "note": "yellow", "good": "green"}
Value = Callable[[MeasuredLink], float | None]


def estimate_text(found: Measurements, parameters: int) -> str:
    """Seconds of one exchange of the model; empty where nothing was measured."""
    seconds, slowest = exchange_s(found, parameters), slowest_bytes_s(found)
    if seconds is None or slowest is None or found.size < 2:
        return ""
    return (
        f"one exchange of {parameters / 1e6:g} M fp32 parameters among {found.size} workers takes {_short(seconds)} "
        f"or more at {rate_text(slowest)}"
    )


def _short(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 100 else seconds_text(seconds)


def print_all(console: Console, found: Measurements, findings: Sequence[Finding], parameters: int | None) -> None:
    """Print the tables, then the findings, the wrong ones last."""
    if len(found.machines) > 1:
        if len(found.machines) <= MOST_COLUMNS:
            _print_matrix(console, found, "bandwidth from row to column", attrgetter("bandwidth_bytes_s"), rate_text)
            _print_matrix(console, found, "round trip", attrgetter("latency_s"), latency_text)
        else:
            _print_slowest(console, found)
    for finding in reversed(findings):
        mark = {"wrong": "WRONG", "note": "note", "good": "ok"}[finding.severity]
        text = Text.assemble((f"{mark:6}", STYLES[finding.severity]), (f"{finding.about}: ", "bold"), finding.sentence)
        if finding.advice:
            text.append(f"\n      -> {finding.advice}")
        console.print(text, soft_wrap=True)
    if parameters is not None and (text_ := estimate_text(found, parameters)):
        console.print(text_, soft_wrap=True)
    wrong = sum(finding.severity == "wrong" for finding in findings)
    last = "fit for training" if not wrong else f"not fit: {wrong} thing{'s are' if wrong > 1 else ' is'} wrong"
    console.print(Text(last, style="bold green" if not wrong else "bold red"))


def _print_matrix(
    console: Console, found: Measurements, title: str, value: Value, show: Callable[[float], str]
) -> None:
    links = {(link.source, link.target): link for link in found.links}
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    ranks = sorted(found.machines)
    for rank in ranks:
        table.add_column(str(rank), justify="right", no_wrap=True)
    for source in ranks:
        cells = [_cell(links.get((source, target)), value, show) for target in ranks]
        table.add_row(f"{source} {found.machines[source].host}", *cells)
    console.print(table)
    console.print()


def _cell(link: MeasuredLink | None, value: Value, show: Callable[[float], str]) -> Text:
    if link is None:
        return Text("")
    if link.problem:
        return Text("none", style="bold red")
    number = value(link)
    return Text("-") if number is None else Text(show(number))


def _print_slowest(console: Console, found: Measurements) -> None:
    links = sorted((k for k in found.links if k.bandwidth_bytes_s), key=lambda k: k.bandwidth_bytes_s or 0)[:10]
    table = Table(title="the ten slowest links", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("from", "to", "bandwidth", "round trip"):
        table.add_column(column)
    for link in links:
        ends = found.name(link.source), found.name(link.target)
        table.add_row(*ends, rate_text(link.bandwidth_bytes_s or 0), latency_text(link.latency_s or 0))
    console.print(table)
    console.print()


def as_json(found: Measurements, findings: Sequence[Finding], parameters: int | None) -> dict[str, Any]:
    """All results."""
    return {
        "fit": fit(findings),
        "findings": [asdict(finding) for finding in findings],
        "slowest_bytes_s": slowest_bytes_s(found),
        "parameters": parameters,
        "exchange_s": None if parameters is None else exchange_s(found, parameters),
        **found.to_json(),
    }


def write_report(directory: Path, found: Measurements, findings: Sequence[Finding], parameters: int | None) -> Path:
    """Write `directory/doctor.html`, the figure as PNG, and all results as JSON; returns the page's path."""
    figure = draw(found)  # first: without matplotlib nothing is written
    directory.mkdir(parents=True, exist_ok=True)
    values = json.dumps(as_json(found, findings, parameters), indent=1)
    (directory / "doctor.json").write_text(values + "\n", encoding="utf-8")
    html = directory / "doctor.html"
    html.write_text(
        page.whole_page("Is this cluster fit?", _body(found, findings, parameters, figure)), encoding="utf-8"
    )
    if figure is not None:
        page.save_png(figure, directory / "doctor.png", "Links of the cluster")
    return html


def _body(found: Measurements, findings: Sequence[Finding], parameters: int | None, figure: Figure | None) -> list[str]:
    wrong = [f"{f.sentence}. To do: {f.advice}." for f in findings if f.severity == "wrong"]
    verdict = "This cluster is fit for training" if not wrong else "This cluster is not fit for training"
    lead = f"{len(found.machines)} of {found.size} workers on {', '.join(found.hosts) or 'no host'}."
    if parameters is not None and (text := estimate_text(found, parameters)):
        lead += f" At best, {text}."
    other = [f for f in findings if f.severity != "wrong"]
    rows = [{"": f.severity, "what": f.about, "found": f.sentence, "to do": f.advice} for f in other]
    parts = [f"<h1>{escape(verdict)}</h1>", f'<p class="lead">{escape(lead)}</p>', page.warning_box(wrong)]
    if figure is not None:
        caption = "From row to column; red crosses are connections that did not open."
        parts.append(page.figure_block(figure, "Links", caption, 0))
    parts += [page.heading("Other checks"), page.table(rows), page.heading("Workers"), page.table(_workers(found))]
    return parts


def _workers(found: Measurements) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "host": machine.host,
            "gloo's address": f"{machine.gloo_address} {machine.gloo_interface}",
            "cores": machine.cores,
            "load": f"{machine.load:.1f}",
            "memory free": "" if machine.memory_bytes is None else f"{machine.memory_bytes / 1e9:.1f} GB",
            "/dev/shm free": "" if machine.shm_bytes is None else f"{machine.shm_bytes / 1e9:.1f} GB",
            "GPUs": len(machine.gpus),
            **machine.versions,
        }
        for rank, machine in sorted(found.machines.items())
    ]


def draw(found: Measurements) -> Figure | None:
    """Bandwidth and latency of every ordered pair, as two heat maps; None for a single worker."""
    if len(found.machines) < 2:
        return None
    with style():
        figure = new_figure(4.4)
        left, right = figure.subplots(1, 2)
        _heat_map(figure, left, found, "bandwidth [Mbit/s]", attrgetter("bandwidth_bytes_s"), 8e-6)
        _heat_map(figure, right, found, "round trip [ms]", attrgetter("latency_s"), 1e3)
    return figure


def _heat_map(figure: Figure, axes: Axes, found: Measurements, label: str, value: Value, scale: float) -> None:
    import numpy as np

    ranks = sorted(found.machines)
    place = {rank: k for k, rank in enumerate(ranks)}
    grid = np.full((len(ranks), len(ranks)), np.nan)
    broken: list[tuple[int, int]] = []
    for link in found.links:
        at = place[link.source], place[link.target]
        number = value(link)
        if link.problem:
            broken.append(at)
        elif number is not None:
            grid[at] = scale * number
    if np.isfinite(grid).any():
        picture = axes.imshow(grid, cmap="viridis", vmin=0)
        figure.colorbar(picture, ax=axes, shrink=0.8)
        _write_numbers(axes, grid)
    for row, column in broken:
        axes.plot(column, row, marker="x", markersize=10, markeredgewidth=2.5, color="#d62728")
    axes.set_xlim(-0.5, len(ranks) - 0.5)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.grid(visible=False)
    axes.set_title(label, fontsize=11)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")


def _write_numbers(axes: Axes, grid: Any) -> None:
    """Write the numbers into the cells of a small grid."""
    import numpy as np

    if len(grid) > 8:
        return
    top = float(np.nanmax(grid))
    for (row, column), number in np.ndenumerate(grid):
        if np.isfinite(number):
            dark = number < 0.6 * top
            text = f"{number:.0f}" if number >= 10 else f"{number:.2f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")

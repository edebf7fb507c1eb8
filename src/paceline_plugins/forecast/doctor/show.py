# SPDX-License-Identifier: Apache-2.0
"""The findings on the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.observe.reports.summary import seconds_text
from paceline_plugins.forecast.doctor.judge import (
    Finding,
    exchange_s,
    fit,
    latency_text,
    rate_text,
    slowest_bytes_s,
)
from paceline_plugins.forecast.doctor.measured import MeasuredLink, Measurements

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

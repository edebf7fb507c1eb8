# SPDX-License-Identifier: Apache-2.0
"""Forecasts as tables for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from paceline.observe.reports.summary import bytes_text, seconds_text, share_text
from paceline_plugins.forecast.planner.advice import Advice
from paceline_plugins.forecast.planner.forecast import Forecast, forecast_json

Rows = Sequence[Sequence[Forecast]]
"""For each rule the forecast at each number of workers, the same numbers for all."""


def efficiencies(rows: Rows, width: int = 120) -> Table:
    """Efficiency in percent, rules by numbers of workers; whole percent in a narrow terminal."""
    names = max(len("efficiency, %"), *(len(row[0].rule) for row in rows))
    wide = names + sum(1 + max(len(f"N={found.workers}"), len("100.0")) for found in rows[0]) <= width
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("efficiency, %" if wide else "% at N =", overflow="fold")
    for found in rows[0]:
        table.add_column(f"N={found.workers}" if wide else str(found.workers), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(Text(row[0].rule), *(f"{100 * found.efficiency:.{1 if wide else 0}f}" for found in row))
    return table


def details(rows: Rows, workers: int) -> Table:
    """At one number of workers: the time of a minibatch and its parts, an epoch, bytes."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(f"at N={workers}", overflow="fold")
    for name in ("a step", "waits", "exchange", "speed-up", "epoch", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    for found in at(rows, workers):
        cells = [
            seconds_text(found.step_s),
            share_text(max(0.0, found.wait_s) / found.step_s),  # rounding may make it negative
            share_text(max(0.0, found.exchange_s) / found.step_s),
            f"{found.speed_up:.2f}",
            seconds_text(found.epoch_s),
            bytes_text(found.epoch_bytes),
        ]
        table.add_row(Text(found.rule), *cells)
    return table


def at(rows: Rows, workers: int) -> list[Forecast]:
    """Each rule's forecast at this number of workers."""
    return [found for row in rows for found in row if found.workers == workers]


def as_json(rows: Rows, advice: Advice, setting: dict[str, Any]) -> dict[str, Any]:
    """All forecasts, for programs."""
    recommended = {"rule": advice.rule, "period": advice.period, "why": advice.why}
    return {
        "setting": setting,
        "forecasts": [forecast_json(found) for row in rows for found in row],
        "advice": recommended | {"forecast": forecast_json(advice.forecast)},
    }

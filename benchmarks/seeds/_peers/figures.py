# SPDX-License-Identifier: Apache-2.0
"""What the workers counted, as the table's columns."""

from __future__ import annotations

import statistics
from typing import Any

from .rows import NOTHING

COLUMNS = ("step_ms", "exposed_ms", "processor_ms", "sent_mb", "idle", "exchanges")


def of_run(found: list[dict[str, Any]]) -> dict[str, float]:
    """One row of one round: the workers' mean pace, and means of the rest."""
    keys, steps = ("processor_s", "sent_bytes", "exchanges"), sum(one["counted_steps"] for one in found)
    return {
        "step_s": statistics.harmonic_mean([one["seconds"] / one["timed_steps"] for one in found]),
        **{key: sum(one[key] for one in found) / steps for key in keys},
        "idle": statistics.fmean(one["idle"] for one in found),
    }


def against(row: dict[str, float], nothing: dict[str, float]) -> dict[str, float]:
    """A row's columns, beside the row of the same round that exchanged nothing.

    Returns:
        step_ms: a step, the blocks' exchanges spread over their steps.
        exposed_ms: for how long training waits for an exchange, milliseconds an exchange.
        processor_ms: processor milliseconds of a worker an exchange, beyond those of training.
        sent_mb: megabytes that left a worker's host a step.
        idle: the share of the processors that was idle.
        exchanges: a step.
    """
    steps = 1 / row["exchanges"] if row["exchanges"] else float("nan")
    return {
        "step_ms": 1e3 * row["step_s"],
        "exposed_ms": 1e3 * (row["step_s"] - nothing["step_s"]) * steps,
        "processor_ms": 1e3 * (row["processor_s"] - nothing["processor_s"]) * steps,
        "sent_mb": row["sent_bytes"] / 1e6,
        "idle": row["idle"],
        "exchanges": row["exchanges"],
    }


def medians(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float | None]]:
    """Row -> column -> median over the rounds that have it; None for a row that made no exchange."""
    columns: dict[str, dict[str, list[float]]] = {}
    for rows in rounds:
        for name, row in rows.items():
            for column, value in against(row, rows[NOTHING]).items():
                columns.setdefault(name, {}).setdefault(column, []).append(value)
    return {name: {column: _median(values) for column, values in row.items()} for name, row in columns.items()}


def _median(values: list[float]) -> float | None:
    real = [value for value in values if value == value]
    return round(statistics.median(real), 4) if real else None


def table(rows: dict[str, dict[str, float | None]]) -> str:
    """For the terminal."""
    exchange = f"{'exposed an exchange':>20} {'processor an exchange':>22}"
    lines = [f"{'row':24} {'step':>9} {exchange} {'sent a step':>12} {'idle':>6}"]
    for name, row in rows.items():
        exposed, processor = (
            f"{row[key]:.1f} ms" if row[key] is not None else "none made" for key in ("exposed_ms", "processor_ms")
        )
        lines.append(
            f"{name:24} {row['step_ms']:6.1f} ms {exposed:>20} {processor:>22} {row['sent_mb']:9.3f} MB "
            f"{100 * (row['idle'] or 0):4.0f} %"
        )
    return "\n".join(lines)

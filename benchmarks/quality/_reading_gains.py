# SPDX-License-Identifier: Apache-2.0
"""The gain study of `lines.py` and `speech.py`: error against the gain of ours at each N, and the law behind it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _block_plots
import _block_report
from _reading import Row

GAIN = "gain "
"""What the names of its methods begin with."""


def gains_of(workers: int, exponents: Sequence[float]) -> list[float]:
    """N^p for each p, to four digits."""
    return [float(f"{workers**p:.4g}") for p in exponents] if workers > 1 else []


def name_of(gain: float) -> str:
    """The method's."""
    return f"{GAIN}{gain:g}"


def report(rows: Sequence[Row], serial: Sequence[Row], minibatches: int, plot: Path | None) -> None:
    """Print the table and the law, draw them, and leave all of it on the last line.

    Args:
        rows: with each gain, N and seed.
        serial: of one worker with the same seeds.
        minibatches: of all workers.
        plot: where the picture goes, or None.
    """
    each: _block_report.Figures = {}
    for row in rows:
        mine = each.setdefault(f"N{row['workers']}", {})
        mine.setdefault(row["method"].removeprefix(GAIN), []).append(row["error"])
    alone = [row["error"] for row in serial]
    result: dict[str, Any] = {
        "study": "gain",
        "optimizer": "adam",
        "minibatches": minibatches,
        "measure": "held-out error rate",
        "serial": _block_report.mean_of(alone),
        "serial_each": alone,
        "loss": _block_report.changed(each, _block_report.mean_of),
        "spread": _block_report.changed(each, _block_report.spread_of),
        "each": each,
    }
    _block_report.show(result)
    result["law"] = _block_report.gain_law(each, len(alone))
    _block_report.show_law(result["law"])
    if plot is not None:
        _block_plots.draw(result, plot)
    print(json.dumps(result))

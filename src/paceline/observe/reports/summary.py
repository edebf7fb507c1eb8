# SPDX-License-Identifier: Apache-2.0
"""Numbers of a run as text, and the shares of its time."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

UNKNOWN = "n/a"


@dataclass(frozen=True)
class Shares:
    """Shares of the measured time; they add up to 1, or are 0 where nothing was measured."""

    compute: float
    wait: float
    exchange: float
    data: float = 0.0  # 0 in logs that count it as computing


def ranks_text(ranks: Collection[int], most: int = 4) -> str:
    """`worker 3`, `workers 1, 2, 5`; of a long list the first `most`."""
    shown = ", ".join(str(rank) for rank in list(ranks)[:most]) + (", ..." if len(ranks) > most else "")
    return f"worker{'s' if len(ranks) > 1 else ''} {shown}"


def delay_text(mean: float) -> str:
    """`2.94`: a mean number of updates."""
    return f"{mean:.2f}"


def bytes_text(count: float) -> str:
    """`1.24 GB`: three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"


def seconds_text(seconds: float) -> str:
    """`8.31 s`, `2 min 05 s`, `3 h 07 min`."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 6000:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"


def count_text(count: float | None) -> str:
    """`65,536`, or `n/a` where it is unknown."""
    return UNKNOWN if count is None else f"{count:,.0f}"


def rate_text(per_s: float | None) -> str:
    """`2,604`, `81.4`, or `n/a`."""
    if per_s is None:
        return UNKNOWN
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def share_text(share: float) -> str:
    """`4.2 %`."""
    return f"{100 * share:.1f} %"


def value_text(value: float) -> str:
    """`1.4983`: enough digits to compare two runs."""
    return f"{value:.4f}" if math.isfinite(value) and 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"

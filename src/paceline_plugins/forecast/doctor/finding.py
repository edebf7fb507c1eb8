# SPDX-License-Identifier: Apache-2.0
"""Findings, and texts for ranks, speeds and round trips."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline_plugins.forecast.doctor.measured import MeasuredLink

Severity = Literal["wrong", "note", "good"]
"""`wrong` would stop or slow down a run; `note` is for a person to decide; `good` is in order."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        severity: `wrong`, `note` or `good`.
        about: the subject, one word or two.
        sentence: the result, with names and numbers.
        advice: what to do; empty where nothing is to be done.
        ranks: the workers that it concerns.
    """

    severity: Severity
    about: str
    sentence: str
    advice: str = ""
    ranks: tuple[int, ...] = ()


def rate_text(bytes_s: float) -> str:
    """`940 Mbit/s`."""
    mbit = 8 * bytes_s / 1e6
    if mbit >= 9999.5:
        return f"{mbit / 1000:.1f} Gbit/s"
    return f"{mbit:.0f} Mbit/s" if mbit >= 10 else f"{mbit:.1f} Mbit/s"


def latency_text(seconds: float) -> str:
    """`0.12 ms`."""
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def speeds(links: Iterable[MeasuredLink]) -> list[float]:
    """The bandwidths that were measured."""
    return [link.bandwidth_bytes_s for link in links if link.bandwidth_bytes_s]


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

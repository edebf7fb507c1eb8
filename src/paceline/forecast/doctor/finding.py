# SPDX-License-Identifier: Apache-2.0
"""What the doctor says: findings, and the words for ranks, hosts, speeds and round trips in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.forecast.doctor.measured import MeasuredLink

Severity = Literal["wrong", "note", "good"]
"""`wrong` would stop a run or make it wait for one slow part; `note` is for a person; `good` was found in order."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: `wrong`, `note` or `good`.
        about: what was looked at, one word or two.
        sentence: what is the case, with names and numbers.
        advice: what to do; empty where nothing is to be done.
        ranks: whom it concerns.
    """

    severity: Severity
    about: str
    sentence: str
    advice: str = ""
    ranks: tuple[int, ...] = ()


def rate_text(bytes_s: float) -> str:
    """A speed as networks give it: `940 Mbit/s`."""
    mbit = 8 * bytes_s / 1e6
    return (
        f"{mbit / 1000:.1f} Gbit/s" if mbit >= 9999.5 else f"{mbit:.0f} Mbit/s" if mbit >= 10 else f"{mbit:.1f} Mbit/s"
    )


def latency_text(seconds: float) -> str:
    """A round trip: `0.12 ms`."""
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def speeds(links: Iterable[MeasuredLink]) -> list[float]:
    return [link.bandwidth_bytes_s for link in links if link.bandwidth_bytes_s]


def count(ranks: Iterable[int]) -> dict[int, int]:
    counted: dict[int, int] = {}
    for rank in ranks:
        counted[rank] = counted.get(rank, 0) + 1
    return counted


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def hosts_text(machines: Sequence[object]) -> str:
    return ", ".join(dict.fromkeys(str(getattr(machine, "host", "")) for machine in machines))

# SPDX-License-Identifier: Apache-2.0
"""Findings about the links between workers: speed, round trips, and offsets of the clocks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from paceline_plugins.forecast.doctor.finding import Finding, latency_text, rate_text, speeds
from paceline_plugins.forecast.doctor.measured import MeasuredLink, Measurements

SLOW = 0.5  # of the median speed
FAR, FAR_S = 5.0, 1e-3  # times the median round trip, and at least so long
SKEW_S = 0.5


def speed(found: Measurements) -> list[Finding]:
    links = [link for link in found.across() if link.bandwidth_bytes_s]
    if not links:
        return []
    usual = _usual(links)
    slow = [link for link in links if (link.bandwidth_bytes_s or 0) < SLOW * usual]
    if slow and len(found.hosts) > 1:
        return _slow(found, slow, links, usual)
    slowest, fastest = min(speeds(links)), max(speeds(links))
    span = rate_text(slowest) if slowest == fastest else f"{rate_text(slowest)} to {rate_text(fastest)}"
    return [Finding("good", "bandwidth", span)]


def _usual(links: Sequence[MeasuredLink]) -> float:
    """The median over the workers of their best link.

    With one slow host of three, the median over the links would be that of a slow link.
    """
    ranks = {end for link in links for end in (link.source, link.target)}
    return statistics.median(max(speeds(_of(rank, links))) for rank in ranks)


def _slow(
    found: Measurements, slow: Sequence[MeasuredLink], links: Sequence[MeasuredLink], usual: float
) -> list[Finding]:
    """Name the ranks that are slow on all links, and then the remaining slow links."""
    findings, left = [], list(slow)
    while left:
        ends = {end for link in left for end in (link.source, link.target)}
        rank = max(sorted(ends), key=lambda r: (len(_of(r, left)) / len(_of(r, links)), len(_of(r, left))))
        if len(_of(rank, left)) < len(_of(rank, links)) and len(_of(rank, left)) <= 2:
            break
        findings.append(_slow_rank(found, rank, _of(rank, left), usual))
        left = [link for link in left if rank not in (link.source, link.target)]
    for link in left:
        rate = f"{rate_text(link.bandwidth_bytes_s or 0)}, where {rate_text(usual)} is usual"
        sentence = f"{found.name(link.source)} sends to {found.name(link.target)} at {rate}"
        concerned = (link.source, link.target)
        findings.append(Finding("wrong", "bandwidth", sentence, "check the route between these two", concerned))
    return findings


def _slow_rank(found: Measurements, rank: int, links: Sequence[MeasuredLink], usual: float) -> Finding:
    out, into = ([k for k in links if getattr(k, end) == rank] for end in ("source", "target"))
    ways = [f"sends at {rate_text(statistics.median(speeds(out)))}"] if out else []
    ways += [f"receives at {rate_text(statistics.median(speeds(into)))}"] if into else []
    sentence = f"{found.name(rank)} {' and '.join(ways)}, where {rate_text(usual)} is usual"
    advice = (
        "every synchronous exchange runs at the speed of the slowest link: check its cable, switch port and duplex, "
        "and which other programs use it"
    )
    return Finding("wrong", "bandwidth", sentence, advice, (rank,))


def _of(rank: int, links: Sequence[MeasuredLink]) -> list[MeasuredLink]:
    """Links from or to a rank."""
    return [link for link in links if rank in (link.source, link.target)]


def distance(found: Measurements) -> list[Finding]:
    links = [link for link in found.across() if link.latency_s is not None]
    if not links:
        return []
    trips = [link.latency_s or 0.0 for link in links]
    ranks = {end for link in links for end in (link.source, link.target)}
    middle = statistics.median(min(k.latency_s or 0.0 for k in _of(rank, links)) for rank in ranks)
    far = [link for link in links if (link.latency_s or 0.0) > max(FAR_S, FAR * middle)]
    if far and len(found.hosts) > 1:
        ends = Counter(end for link in far for end in (link.source, link.target))
        rank = max(sorted(ends), key=lambda r: ends[r])
        longest = max(link.latency_s or 0.0 for link in far)
        sentence = f"{found.name(rank)} is far from other workers: a round trip takes up to {latency_text(longest)}, "
        sentence += f"where {latency_text(middle)} is usual"
        return [Finding("note", "latency", sentence, "prefer rules that exchange once a block", (rank,))]
    return [Finding("good", "latency", f"{latency_text(min(trips))} to {latency_text(max(trips))} a round trip")]


def clocks(found: Measurements) -> list[Finding]:
    ahead = _ahead(found)
    if len(ahead) < 2:
        return []
    wrong = {rank: seconds for rank, seconds in ahead.items() if abs(seconds) > SKEW_S}
    if wrong:
        rank = max(wrong, key=lambda r: abs(wrong[r]))
        direction = "ahead" if wrong[rank] > 0 else "behind"
        more = f", and {len(wrong) - 1} more are wrong" if len(wrong) > 1 else ""
        sentence = f"the clock of {found.name(rank)} is {abs(wrong[rank]):.1f} s {direction}{more}"
        return [
            Finding(
                "note", "clocks", sentence, "run an NTP client there, or times in logs will not match", tuple(wrong)
            )
        ]
    most = max(ahead.values()) - min(ahead.values())
    return [Finding("good", "clocks", f"within {latency_text(most)} of each other")]


def _ahead(found: Measurements) -> dict[int, float]:
    """Offset of each clock from the median clock, as measured from and to the first rank."""
    first = min(found.machines, default=0)
    seen = {first: 0.0}
    for link in found.links:
        if link.clock_s is not None and link.target == first:
            seen.setdefault(link.source, -link.clock_s)
    seen |= {k.target: k.clock_s for k in found.links if k.clock_s is not None and k.source == first}
    middle = statistics.median_low(seen.values())
    return {rank: seconds - middle for rank, seconds in seen.items()}

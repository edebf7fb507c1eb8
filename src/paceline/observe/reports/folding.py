# SPDX-License-Identifier: Apache-2.0
"""A log of any length in bounded memory: lines of exchanges are added up in pairs, of reports every second one is kept.

Totals stay what they are; curves keep more points than a figure can show.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from paceline.observe.reports.events import ExchangeEvent, Value
from paceline.observe.reports.log import WorkerLog

MOST_LINES = 50_000
MOST_REPORTS = 200_000


class Folding:
    """Keeps one worker's log short while it is read."""

    def __init__(self, log: WorkerLog) -> None:
        self._log = log
        self._every, self._seen = 1, Counter[str]()
        self._last: Value | None = None

    def look(self) -> None:
        """After each event."""
        log = self._log
        if len(log.exchanges) > 2 * MOST_LINES:
            log.exchanges = pairs(log.exchanges)
        if log.values and self._every > 1 and log.values[-1] is not self._last:
            name = log.values[-1].name
            self._seen[name] += 1
            if self._seen[name] % self._every:
                log.values.pop()
        if len(log.values) > 2 * MOST_REPORTS:
            self._thin()
        self._last = log.values[-1] if log.values else None

    def _thin(self) -> None:
        """Keep the reports of each name whose number can be divided by twice as much as before."""
        seen, kept = Counter[str](), []
        for value in self._log.values:
            seen[value.name] += 1
            if seen[value.name] % 2 == 0:
                kept.append(value)
        self._seen = Counter({name: max(self._seen[name], count * self._every) for name, count in seen.items()})
        self._every, self._log.values = 2 * self._every, kept


def pairs(lines: list[ExchangeEvent]) -> list[ExchangeEvent]:
    """Each two lines of one generation as one."""
    folded: list[ExchangeEvent] = []
    rest = list(reversed(lines))
    while rest:
        first = rest.pop()
        folded.append(both(first, rest.pop()) if rest and rest[-1].generation == first.generation else first)
    return folded


def both(first: ExchangeEvent, second: ExchangeEvent) -> ExchangeEvent:
    """What the two lines say together."""
    data = [line.data_s for line in (first, second) if line.data_s is not None]
    counted = [line.samples for line in (first, second) if line.samples is not None]
    met = first if second.met is None else second
    return replace(
        second,
        exchanges=first.exchanges + second.exchanges,
        minibatches=first.minibatches + second.minibatches,
        samples=sum(counted) if counted else None,
        total_samples=first.total_samples if second.total_samples is None else second.total_samples,
        compute_s=first.compute_s + second.compute_s,
        wait_s=first.wait_s + second.wait_s,
        exchange_s=first.exchange_s + second.exchange_s,
        bytes=first.bytes + second.bytes,
        left_out=first.left_out + second.left_out,
        warmup=first.warmup and second.warmup,
        delays=dict(Counter(first.delays) + Counter(second.delays)),
        refused=first.refused + second.refused,
        data_s=sum(data) if data else None,
        met=met.met,
        met_s=met.met_s,
    )

# SPDX-License-Identifier: Apache-2.0
"""A log of any length in bounded memory: exchanges are merged in pairs, of reported values every second one is kept.

Totals stay exact; curves keep more points than a figure can show.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from paceline.observe.reports.events import ExchangeEvent, Value
from paceline.observe.reports.log import WorkerLog

MOST_LINES = 50_000
MOST_REPORTS = 200_000
SUMS = ("exchanges", "minibatches", "compute_s", "wait_s", "exchange_s", "bytes", "left_out", "refused")
OPTIONAL_SUMS = ("samples", "data_s")


class Folding:
    """Keeps one worker's log short while it is read.

    Args:
        log: of the worker.
        most_lines: exchanges that are kept, up to twice as many; None: enough for all figures.
        most_reports: the same of reported values.
    """

    def __init__(self, log: WorkerLog, most_lines: int | None = None, most_reports: int | None = None) -> None:
        self._log = log
        self._most_lines, self._most_reports = most_lines or MOST_LINES, most_reports or MOST_REPORTS
        self._every, self._seen = 1, Counter[str]()
        self._last: Value | None = None

    def after_event(self) -> None:
        """Fold the log where it has become too long."""
        log = self._log
        if len(log.exchanges) > 2 * self._most_lines:
            log.exchanges = merge_pairs(log.exchanges)
        if log.values and self._every > 1 and log.values[-1] is not self._last:
            name = log.values[-1].name
            self._seen[name] += 1
            if self._seen[name] % self._every:
                log.values.pop()
        if len(log.values) > 2 * self._most_reports:
            self._thin()
        self._last = log.values[-1] if log.values else None

    def _thin(self) -> None:
        """Keep every second report of each name."""
        seen, kept = Counter[str](), []
        for value in self._log.values:
            seen[value.name] += 1
            if seen[value.name] % 2 == 0:
                kept.append(value)
        self._seen = Counter({name: max(self._seen[name], count * self._every) for name, count in seen.items()})
        self._every, self._log.values = 2 * self._every, kept


def merge_pairs(lines: list[ExchangeEvent]) -> list[ExchangeEvent]:
    """Each two lines of one generation as one."""
    merged: list[ExchangeEvent] = []
    rest = list(reversed(lines))
    while rest:
        first = rest.pop()
        merged.append(merge(first, rest.pop()) if rest and rest[-1].generation == first.generation else first)
    return merged


def merge(first: ExchangeEvent, second: ExchangeEvent) -> ExchangeEvent:
    """Two successive lines as one."""
    sums = {name: getattr(first, name) + getattr(second, name) for name in SUMS}
    for name in OPTIONAL_SUMS:
        known = [value for value in (getattr(first, name), getattr(second, name)) if value is not None]
        sums[name] = sum(known) if known else None
    met = first if second.met is None else second
    return replace(
        second,
        **sums,
        total_samples=first.total_samples if second.total_samples is None else second.total_samples,
        warmup=first.warmup and second.warmup,
        delays=dict(Counter(first.delays) + Counter(second.delays)),
        met=met.met,
        met_s=met.met_s,
    )

# SPDX-License-Identifier: Apache-2.0
"""The sinks of a run: each receives the user's values at once, and the run's own metrics at intervals."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.core.world import World
from paceline.observe.sinks.async_writer import AsyncWriter
from paceline.observe.sinks.base import PREFIX, Values, as_sink

if TYPE_CHECKING:
    from paceline.observe.sinks.metrics import Metrics

RATES = ("minibatches", "samples")
"""Totals whose growth per second is sent as well."""

Take = Callable[[Values, int], None]


@dataclass
class _Receiver:
    """One receiver, and the run's metrics that it received last."""

    take: Take
    every_s: float
    on_every_worker: bool  # or on rank 0 only
    sent_s: float = field(default_factory=time.perf_counter)
    sent_step: int | None = None
    totals: Values = field(default_factory=dict)

    def rates(self, totals: Values, now: float) -> Values:
        """Growth per second since the last time."""
        span = max(1e-9, now - self.sent_s)
        return {f"{name}_per_s": (totals[name] - self.totals.get(name, 0.0)) / span for name in RATES if name in totals}


class Dispatcher:
    """All receivers of one worker.

    Args:
        world: the worker's present rank.
        totals: the run's own metrics, counted from its start; the argument is the block.
        settings: present values of the tunables that are numbers.
    """

    def __init__(
        self, world: Callable[[], World], totals: Callable[[int], Values], settings: Callable[[], Values]
    ) -> None:
        self._world, self._totals, self._settings = world, totals, settings
        self._receivers: list[_Receiver] = []
        self._closing: list[AsyncWriter | Metrics] = []
        self._newest: tuple[int, int] | None = None  # block and step of the last progress

    def _add(self, take: Take, every_s: float, on_every_worker: bool) -> None:
        self._receivers.append(_Receiver(take, every_s, on_every_worker, totals=self._totals(0)))

    def add_sink(self, target: Any, sign: Callable[[str], str], every_s: float, on_every_worker: bool) -> None:
        """Send to a sink or tracker, in a thread of its own."""
        writer = AsyncWriter(as_sink(target), type(target).__name__, sign)
        self._closing.append(writer)
        self._add(writer.offer, every_s, on_every_worker)

    def serve_metrics(self, address: str) -> str:
        """Serve metrics to scrapers; returns the address."""
        from paceline.observe.sinks.metrics import Metrics  # here, because it loads an HTTP server

        metrics = Metrics(address, self._world)
        self._closing.append(metrics)
        metrics.take(_prefixed(self._totals(0)), 0)
        self._add(metrics.take, 0.0, True)
        return metrics.address

    def log(self, values: Values, step: int) -> None:
        """Send values that the user logged."""
        for receiver in self._active():
            receiver.take(dict(values), step)

    def progress(self, block: int, step: int) -> None:
        """Send the run's own metrics to the receivers that are due."""
        self._newest, now = (block, step), time.perf_counter()
        self._send([one for one in self._active() if now - one.sent_s >= one.every_s], now)

    def _send(self, due: list[_Receiver], now: float) -> None:
        if not due or self._newest is None:
            return
        block, step = self._newest
        totals, settings = self._totals(block), self._settings()
        for receiver in due:
            receiver.take(_prefixed(totals | receiver.rates(totals, now) | settings), step)
            receiver.sent_s, receiver.sent_step, receiver.totals = now, step, totals

    def _active(self) -> list[_Receiver]:
        """Receivers of this worker at present: rank 0 of an elastic run may become another worker."""
        if not self._receivers:
            return []
        first = self._world().rank == 0
        return [receiver for receiver in self._receivers if first or receiver.on_every_worker]

    def close(self) -> None:
        """Send what is newer than the last interval, as all of a run that is shorter than one, and close all sinks."""
        newest = None if self._newest is None else self._newest[1]
        self._send([one for one in self._active() if one.sent_step != newest], time.perf_counter())
        self._receivers = []
        while self._closing:
            self._closing.pop().close()


def _prefixed(values: Values) -> Values:
    return {f"{PREFIX}{name}": value for name, value in values.items()}

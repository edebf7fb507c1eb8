# SPDX-License-Identifier: Apache-2.0
"""The sinks of a run, and what each is told when: the user's values at once, the run's own now and then."""

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
"""Totals whose growth per second is told as well."""

Take = Callable[[Values, int], None]


@dataclass
class _Outlet:
    """One receiver, and what it was told last of the run's own numbers."""

    take: Take
    every_s: float
    each: bool  # on every worker, and not on the first alone
    told_s: float = field(default_factory=time.perf_counter)
    totals: Values = field(default_factory=dict)

    def rates(self, totals: Values, now: float) -> Values:
        """Growth per second since it was told last."""
        span = max(1e-9, now - self.told_s)
        return {f"{name}_per_s": (totals[name] - self.totals.get(name, 0.0)) / span for name in RATES if name in totals}


class Dispatcher:
    """All receivers of one worker.

    Args:
        world: where this worker stands at present.
        totals: the run's own numbers, counted from its start; the argument is the block.
        settings: numbers that can be tuned, as they are at present.
    """

    def __init__(
        self, world: Callable[[], World], totals: Callable[[int], Values], settings: Callable[[], Values]
    ) -> None:
        self._world, self._totals, self._settings = world, totals, settings
        self._outlets: list[_Outlet] = []
        self._closing: list[AsyncWriter | Metrics] = []

    def add(self, take: Take, every_s: float, each: bool) -> None:
        """One more receiver, whose `take` returns at once."""
        self._outlets.append(_Outlet(take, every_s, each, totals=self._totals(0)))

    def add_feeder(self, thing: Any, sign: Callable[[str], str], every_s: float, each: bool) -> None:
        """A sink, or what is taken for one, behind a thread of its own."""
        feeder = AsyncWriter(as_sink(thing), type(thing).__name__, sign)
        self._closing.append(feeder)
        self.add(feeder.offer, every_s, each)

    def serve(self, address: str) -> str:
        """Numbers for whoever scrapes them; returns where."""
        from paceline.observe.sinks.metrics import Metrics  # here, because it brings a server of HTTP

        metrics = Metrics(address, self._world)
        self._closing.append(metrics)
        metrics.take({f"{PREFIX}{name}": value for name, value in self._totals(0).items()}, 0)
        self.add(metrics.take, 0.0, True)
        return metrics.address

    def said(self, values: Values, step: int) -> None:
        """The user has logged values."""
        for outlet in self._now():
            outlet.take(dict(values), step)

    def stands(self, block: int, step: int) -> None:
        """The run has counted anew; those hear of it who have not for a while."""
        now = time.perf_counter()
        due = [outlet for outlet in self._now() if now - outlet.told_s >= outlet.every_s]
        if not due:
            return
        totals, settings = self._totals(block), self._settings()
        for outlet in due:
            own = totals | outlet.rates(totals, now) | settings
            outlet.take({f"{PREFIX}{name}": value for name, value in own.items()}, step)
            outlet.told_s, outlet.totals = now, totals

    def _now(self) -> list[_Outlet]:
        """Who listens on this worker at present: the first worker of an elastic run may become another."""
        if not self._outlets:
            return []
        first = self._world().rank == 0
        return [outlet for outlet in self._outlets if first or outlet.each]

    def close(self) -> None:
        """The run is over."""
        self._outlets = []
        while self._closing:
            self._closing.pop().close()

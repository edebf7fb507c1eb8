# SPDX-License-Identifier: Apache-2.0
"""Counts the results of a worker's pushes for the event log."""

from __future__ import annotations

import time

from paceline.update.exchange.header import Timing
from paceline.update.monitor import Monitor


class ExchangeTally:
    """The results of pushes since the last line of the log.

    Attributes:
        delays: of the pushes that were answered.
        refused: pushes that were not finite.
        wait_s: seconds that the worker waited for answers.
    """

    def __init__(self) -> None:
        self.delays: list[int] = []
        self.refused = 0
        self.wait_s = 0.0

    def report(self, monitor: Monitor, began: float, pushes: int) -> None:
        """Write the counts to the log, and reset them.

        Args:
            monitor: of the run.
            began: when the exchange began, by `time.perf_counter`.
            pushes: that this worker has made.
        """
        for delay in self.delays:
            monitor.pushed(delay)
        if self.refused:
            monitor.refused(self.refused)
        if self.delays or self.refused:
            timing = Timing(wait_s=self.wait_s, exchange_s=max(0.0, time.perf_counter() - began - self.wait_s))
            monitor.end(timing, None, block=pushes, warmup=False)
        else:
            monitor.sent()
        self.delays, self.refused, self.wait_s = [], 0, 0.0

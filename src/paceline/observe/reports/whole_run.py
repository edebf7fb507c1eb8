# SPDX-License-Identifier: Apache-2.0
"""How much of a run is done, where the program reports its end: with `run.progress`, or through a framework's trainer.

Of T turns of the outermost loop t are over, and the share p of the pass over the data within the present one, so that
(t + p) / T of the run is done. The time left follows from the mean pace since the first turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.observe.reports.log import WorkerLog


class WholeRun:
    """Of one worker.

    Attributes:
        turns: turns over, and all of them; None where the program reports none.
    """

    def __init__(self) -> None:
        self.turns: tuple[int, int] | None = None
        self._first: tuple[float, float] | None = None  # time, and share that was done
        self._passes = 0  # over the data, that began within the present turn
        self._at_s = 0.0

    def add(self, event: WorkerLog) -> None:
        """A line of the log."""
        self._at_s = max(self._at_s, event.last_at_s)
        if event.turn is not None:
            self.turns, self._passes = event.turn, 0
            if self._first is None:
                self._first = event.last_at_s, event.turn[0] / event.turn[1]
        self._passes += len(event.epochs)

    def done(self, of_pass: float | None) -> float | None:
        """The share of the run that is done.

        Args:
            of_pass: the share of the present pass over the data; it counts if a turn has one.
        """
        if self.turns is None:
            return None
        turn, turns = self.turns
        return min(1.0, (turn + (of_pass or 0.0 if self._passes == 1 else 0.0)) / turns)

    def left_s(self, of_pass: float | None) -> float | None:
        """Seconds to the end; None where that is not known yet."""
        done = self.done(of_pass)
        if done is None or self._first is None or done <= self._first[1]:
            return None
        began_s, before = self._first
        return (1.0 - done) * (self._at_s - began_s) / (done - before)


def slowest(workers: Iterable[tuple[WholeRun, float | None]]) -> tuple[float | None, float | None]:
    """The least share that is done, and the most seconds that are left, of workers and their shares of a pass."""
    rows = [(one.done(of_pass), one.left_s(of_pass)) for one, of_pass in workers]
    done = min((one for one, _ in rows if one is not None), default=None)
    return done, max((left for _, left in rows if left is not None), default=None)

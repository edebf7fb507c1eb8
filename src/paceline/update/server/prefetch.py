# SPDX-License-Identifier: Apache-2.0
"""When a worker pulls new values: so late that they are fresh, and early enough to arrive before the minibatch ends.

    lead = 0.8 c - 1.5 a          c: what a short minibatch takes, a: what an answer takes; at least 0

Values that are pulled at the end of a minibatch lack, at the end of the next one, all that other workers pushed
meanwhile; pulled `lead` seconds later, they lack little more than the pushes during the answer's way.
c is the lower quartile of the last minibatches, because a late pull makes the worker wait; a is the median of the last
answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

KEPT = 16
SHORT, SLOW = 0.8, 1.5


class PullTiming:
    """The last durations of minibatches and of answers, seconds."""

    def __init__(self) -> None:
        self._minibatches: deque[float] = deque(maxlen=KEPT)
        self._answers: deque[float] = deque(maxlen=KEPT)

    def computed(self, seconds: float) -> None:
        """Note how long a minibatch took."""
        self._minibatches.append(seconds)

    def answered(self, seconds: float) -> None:
        """Note how long an answer took."""
        self._answers.append(seconds)

    @property
    def lead(self) -> float:
        """Seconds to wait before the pull; 0 before the first measurements."""
        if not self._minibatches or not self._answers:
            return 0.0
        short = sorted(self._minibatches)[len(self._minibatches) // 4]
        slow = sorted(self._answers)[len(self._answers) // 2]
        return max(0.0, SHORT * short - SLOW * slow)

    def state(self) -> list[list[float]]:
        """The durations for a checkpoint."""
        return [list(self._minibatches), list(self._answers)]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        """Restore what `state` gave."""
        self._minibatches, self._answers = (deque(row, maxlen=KEPT) for row in state)

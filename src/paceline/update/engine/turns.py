# SPDX-License-Identifier: Apache-2.0
"""Synchronous steps in turns: few workers train together at first (:mod:`paceline.tuning.sync_scaling`).

In a round each worker makes one step, in groups one after another. A group's gradients are exchanged among all workers,
of which the others bring none. After its step one of it gives its parameters and its optimizers' state to all. A worker
waits for the groups before its own when its program asks for the next batch, and for those after it behind its step. So
all hold the same whenever the program goes on: it evaluates, saves and ends as if all had stepped together.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.world import World
from paceline.update.exchange.exchanger import STEPPED, ExchangeSummary


class Turns:
    """One worker's count of all turns.

    Args:
        groups: gives the number of groups of the round in which workers make a step, counted from 1.
        join: takes part in the next exchange without a gradient, given whether this worker has just made a step.
        give: a worker gives all others what it has after its step.
        steps: of this worker so far.
    """

    def __init__(
        self,
        world: World,
        groups: Callable[[int], int],
        join: Callable[[bool], ExchangeSummary],
        give: Callable[[int], None],
        steps: int,
    ) -> None:
        self._world, self._groups, self._join, self._give = world, groups, join, give
        self.begin(steps + 1)

    def begin(self, step: int) -> None:
        """The round begins in which each worker makes this step, counted from 1."""
        self._step, self._turn, self._count = step, 0, self._groups(step)

    @property
    def few(self) -> bool:
        """Whether not all workers make the step together."""
        return self._count > 1

    @property
    def mine(self) -> bool:
        """Whether it is this worker's turn."""
        return self._turn == self._world.rank * self._count // self._world.size

    def wait(self) -> None:
        """Wait for this worker's turn."""
        while not self.mine:
            self.joined(self._join(False))

    def stepped(self) -> None:
        """This worker has made its step: wait for the rest of the round."""
        step = self._step
        if self.few:
            self.joined(self._join(True))
        else:
            self.begin(step + 1)
        while self._step == step:
            self.joined(self._join(False))

    def joined(self, summary: ExchangeSummary) -> None:
        """An exchange is over: of gradients, on which a step may follow, or one that ends a turn."""
        if summary.brought:  # at their next step they are in a later round, where all make it together
            if (step := summary.headers[summary.brought[0]].total + 1) > self._step:
                self.begin(step)
            return
        stepped = [rank for rank, h in enumerate(summary.headers) if h.kind == STEPPED]
        if stepped:  # else those whose turn it was are at the end of their data
            self._give(stepped[0])
        self._turn += 1
        if self._turn == self._count:
            self.begin(self._step + 1)

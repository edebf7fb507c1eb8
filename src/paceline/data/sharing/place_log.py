# SPDX-License-Identifier: Apache-2.0
"""Which places of the data each step of a worker trained on, until its work is in the global model."""

from __future__ import annotations

from collections import deque
from typing import Any

from paceline.data.ledger.epoch_ledger import ENDLESS
from paceline.data.sampling.assignment import Portion
from paceline.data.sampling.position import Cut

Row = list[Any]
"""[loader, epoch, places of the epoch or -1, [[begin, end], ..], part i, of n]: what one batch held."""


class PlaceLog:
    """The places of the batches that were handed out; its methods follow those of the loader registry.

    A batch whose places are not known is None, and so is a step without one: the program has data of its own.
    """

    def __init__(self) -> None:
        self._now: list[Row | None] = []
        self._steps: deque[tuple[int, list[Row | None]]] = deque()

    def handed_out(self, loader: int, cut: Cut | None, portion: Portion | None) -> None:
        """A batch of loader number `loader` goes to the program."""
        if portion is None:
            self._now.append(None)
            return
        total = -1 if cut is None or cut[1] >= ENDLESS else cut[1]
        part = portion.part or (0, 1)
        self._now.append([loader, portion.epoch, total, [list(one) for one in portion.places], *part])

    def untrained(self, batches: int) -> None:
        """Forget the batches after the first `batches` since the last step."""
        del self._now[batches:]

    def stepped(self, steps: int) -> None:
        """The optimizer made step number `steps`."""
        self._steps.append((steps, self._now or [None]))
        self._now = []

    def take(self, steps: int) -> tuple[list[Row], int]:
        """Take the places of all steps up to number `steps`, and how many of their batches have unknown ones."""
        batches: list[Row | None] = []
        while self._steps and self._steps[0][0] <= steps:
            batches += self._steps.popleft()[1]
        rows = [row for row in batches if row is not None]
        return _joined(rows), len(batches) - len(rows)

    def state(self) -> list[Any]:
        """For a checkpoint."""
        return [self._now, [[steps, rows] for steps, rows in self._steps]]

    def load(self, state: list[Any]) -> None:
        """Restore `state`."""
        self._now = list(state[0])
        self._steps = deque((steps, rows) for steps, rows in state[1])


def _joined(rows: list[Row]) -> list[Row]:
    """The same places in fewer rows: those of one epoch together, neighbours as one range."""
    found: dict[tuple[int, ...], Row] = {}
    for loader, epoch, total, ranges, part, parts in rows:
        row = found.setdefault((loader, epoch, total, part, parts), [loader, epoch, total, [], part, parts])
        for begin, end in ranges:
            if parts == 1 and row[3] and row[3][-1][1] == begin:
                row[3][-1][1] = end
            else:
                row[3].append([begin, end])
    return list(found.values())

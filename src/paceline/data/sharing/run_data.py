# SPDX-License-Identifier: Apache-2.0
"""What the batches of all loaders have in common: the samples of the present step, and the leases in hand.

For receipts: which places of the data each step of a worker trained on, until its work is in the global model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from paceline.core.world import World
from paceline.data.ledger.epoch_ledger import ENDLESS, Mark
from paceline.data.ledger.leases import Leases
from paceline.data.sampling.assignment import Portion
from paceline.data.sampling.position import Cut


class RunData:
    """Counts the batches that the shared loaders of a run hand out.

    Args:
        world: this worker.
        seed: of the order of samples.
        began: called with (epoch, number of batches or None) at the start of every pass.

    Attributes:
        leases: the connection to the ledger, under rules that lease samples.
        places: notes which places each step trained on; None unless receipts are written.
    """

    def __init__(self, world: World, seed: int, began: Callable[[int, int | None], None]) -> None:
        self.world, self.seed, self.began = world, seed, began
        self.leases: Leases | None = None
        self.places: PlaceLog | None = None
        self.warn: Callable[[str, str], None] = lambda key, text: None
        """Called with a warning, and a key that it has in common with later ones of its kind."""
        self._batches = 0  # handed out so far
        self._since = [0, 0, 0]  # samples, batches and nominal samples since the last step
        self._wholes: dict[int, int] = {}  # data that each worker reads as a whole -> sum of its first batches
        self._in_hand: list[Mark] = []  # handed out, but not yet in a push
        self._coming: list[Mark] = []  # of the batch that is handed out now

    @property
    def idle(self) -> bool:
        """Whether no batch was handed out since the last step."""
        return not self._since[1]

    def read_as_a_whole(self, number: int, checksum: int) -> None:
        """Each worker reads these data as a whole; its first batches of a pass have this checksum."""
        self._wholes[number] = checksum

    def handed_out(self, samples: int, nominal: int, marks: list[Mark]) -> None:
        """A batch goes to the program; `samples` is 0 if unknown."""
        if self.leases is not None:
            self._coming = marks
            self.leases.hand_out(marks)
            self._coming = []
        self._since[0] += samples
        self._since[1] += 1
        self._batches += 1
        self._since[2] += nominal
        self._in_hand += marks

    @property
    def since(self) -> tuple[int, int, int]:
        """Samples, batches and nominal samples handed out since the last step."""
        samples, batches, nominal = self._since
        return samples, batches, nominal

    def untrained(self, since: tuple[int, int, int]) -> None:
        """Restore an earlier value of `since`: the batches after it are no part of the next step."""
        self._since = list(since)
        if self.places is not None:
            self.places.untrained(since[1])

    def passed_over(self, marks: list[Mark]) -> None:
        """These leased places turned out to be empty."""
        self._in_hand += marks

    def take_marks(self) -> list[Mark]:
        """Take the leased places whose work is pushed now."""
        marks, self._in_hand = self._in_hand, []
        return marks

    @property
    def factor(self) -> float:
        """Samples since the last step, relative to full batches; 1 if unknown."""
        samples, batches, nominal = self._since
        return samples / nominal if batches and samples and nominal else 1.0


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
    rows_by_key: dict[tuple[int, ...], Row] = {}
    for loader, epoch, total, ranges, part, parts in rows:
        row = rows_by_key.setdefault((loader, epoch, total, part, parts), [loader, epoch, total, [], part, parts])
        for begin, end in ranges:
            if parts == 1 and row[3] and row[3][-1][1] == begin:
                row[3][-1][1] = end
            else:
                row[3].append([begin, end])
    return list(rows_by_key.values())

# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is, where the number of workers that train grows: the others wait in `run.share`.

A worker that waits *stands*: it joins the others' exchanges with nothing, until it is its turn or the pass is over. A
worker that trains stands where all have to agree: where the number of workers changes (before its next batch), where a
checkpoint is taken (with its next batch in hand), and at the end of its pass. When all N stand, each says why and where
it is in its data, and all go on alike. With all N in training nobody stands.

A pass is dealt to the workers that train if it begins with gradients on and the model in training mode; other passes
(evaluation) are split among all N. Within a pass that is dealt, every other pass is dealt to the same workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from paceline.core.world import World
from paceline.data.sampling.dealing import Turn
from paceline.data.sampling.position import Position
from paceline.errors import UnsupportedError

WAITS, CHANGES, GOES_ON, LEFT, OVER = "waits", "changes", "goes on", "left", "over"
"""Why a worker stands."""


class TrainingWorkers(Protocol):
    """Which workers train; an exchange may change it."""

    workers: int
    coming: int
    rank: int

    @property
    def active(self) -> bool:
        """Whether a worker waits."""

    @property
    def changes(self) -> bool:
        """Whether their number changes before the next batch."""

    @property
    def waits(self) -> bool:
        """Whether this worker waits."""

    @property
    def trains(self) -> bool:
        """Whether the program trains now, rather than evaluates."""

    def stand(self, said: Any) -> list[Any] | None:
        """Join the next exchange; what every worker said if all stand, None if there was a payload."""

    def change(self) -> None:
        """Continue with the next number of workers."""


class Turns:
    """The turns of one worker.

    Args:
        world: this worker.
        workers: which workers train.
        positions: gives this worker's positions in all shared data.
        under_way: whether a pass over the data of a position is under way here.
        safe: the hook of :class:`paceline.data.sharing.loader_registry.LoaderRegistry` for checkpoints.

    Attributes:
        lead: position of the outermost pass that is dealt to the workers that train; None outside of one.
        joined: called before and after this worker joins an exchange while it stands.
        waits: called when this worker begins to wait in the pass over a position's data.
        closed: whether the run is over.
    """

    def __init__(
        self,
        world: World,
        workers: TrainingWorkers,
        positions: Callable[[], Sequence[Position]],
        under_way: Callable[[Position], bool],
        safe: Callable[[], Callable[[], None] | None],
    ) -> None:
        self._world, self.workers, self._positions = world, workers, positions
        self._under_way, self._safe, self.closed = under_way, safe, False
        self.lead: Position | None = None
        self.joined: Callable[[], None] = lambda: None
        self.waits: Callable[[Position], None] = lambda position: None
        self._thread: int | None = None
        self._rows: list[Any] = []
        self._left, self._short = False, ""
        self._over = ""  # how the pass ended for the workers that train, while this one waited

    def begin(self, position: Position) -> None:
        """A pass over the data of `position` begins."""
        now, active = position.now, self.workers.active
        if active and not now.turns and not now.batches and (self.lead is not None or self.workers.trains):
            now.turns = [(0, self.workers.workers)]
        if now.turns and self.lead is None:
            self.lead, self._thread, self._over = position, threading.get_ident(), ""

    def ready(self, position: Position) -> bool:
        """Wait until this worker may take its next batch; False if the pass is over."""
        if position is not self.lead or not self.workers.active:
            return True
        if self.workers.waits:
            self.waits(position)
            return self._stand(WAITS)
        return self._stand(CHANGES) if self.workers.changes else True

    def go_on(self, position: Position) -> None:
        """This worker has its next batch, and takes a checkpoint."""
        if position is self.lead and self.workers.active:
            self._stand(GOES_ON)

    def leave(self, position: Position, length: int | None, share: float) -> None:
        """The program left a pass early, perhaps because of an error.

        Args:
            position: of its data.
            length: batches of one of all N workers, if known.
            share: of the epoch's samples that were handed out.
        """
        if position is not self.lead:
            return
        self._left, self._short, batches = True, "", position.now.batches
        if batches == length and share < 1:
            self._short = (
                f"the program left its pass over run.share after {batches} batches, as many as len(..) says that each "
                f"of {self._world.size} workers has, but while {self.workers.workers} of them train each has more, and "
                f"{1 - share:.0%} of the samples were left out; go through run.share to its end, or leave grow out"
            )

    def end(self, position: Position) -> bool:
        """The pass is over; returns whether the epoch is complete."""
        if position is not self.lead:
            return True
        if not self._over and self.workers.active:
            self._stand(OVER)
            self._over = OVER  # for this worker, whether others left it
        self.lead = None
        return self._over != LEFT

    def settle(self) -> None:
        """The program goes on after a pass that it left early: let those that wait leave it, too.

        Raises:
            UnsupportedError: it left the pass after as many batches as each of all N workers would have.
        """
        if not self._left or self.closed:
            return
        self._left = False
        if self.workers.active and not self._over:
            if self._short:
                raise UnsupportedError(self._world.sign(self._short))
            self._stand(LEFT)
        self.lead = None

    def _stand(self, why: str) -> bool:
        """Stand until this worker may go on; False if the pass is over for all."""
        if threading.get_ident() != self._thread:
            raise UnsupportedError(
                self._world.sign(
                    "run.share is iterated in another thread than its pass began in, where the number of workers "
                    "grows and all of them meet between two batches; iterate in the thread that trains, and let a "
                    "DataLoader's num_workers make batches ahead"
                )
            )
        while True:
            self.joined()
            take = self._safe() if why == WAITS else None  # the others decide before they fetch their next batch
            said = self.workers.stand([why, [self._row(position) for position in self._positions()]])
            if said is None:
                continue
            self._rows = said[: self.workers.workers]
            reasons = {row[0] for row in self._rows}
            if self.workers.changes:
                self._change()
                if why == CHANGES or (why == WAITS and not self.workers.waits):
                    return True
                if why in (LEFT, OVER) and not self.workers.active:
                    return False
            elif GOES_ON in reasons:
                if why == GOES_ON:
                    return True
                if take is not None:
                    take()
            else:
                self._over = LEFT if LEFT in reasons else OVER
                self._follow(None)
                return False

    def _change(self) -> None:
        """Deal what remains to the next number of workers; those that begin stand where the others do."""
        self._follow(self.workers.coming)
        self.workers.change()

    def _follow(self, coming: int | None) -> None:
        """Workers that wait take the others' positions; with `coming` workers from here on, if that is given."""
        for number, position in enumerate(self._positions()):
            rows = [row[1][number] for row in self._rows if number < len(row[1])]
            if not rows:
                continue
            epoch = max(row[0] for row in rows)
            batches = max(row[1] for row in rows if row[0] == epoch)
            turns = next(row[2] for row in rows if row[0] == epoch)
            if coming is not None and turns:
                turns = [*(turn for turn in turns if turn[0] < batches), (batches, coming)]
            if self.workers.waits:
                position.follow_pass(epoch, batches, _turns(turns))
                if position is not self.lead:
                    position.fresh = next(row[3] for row in rows if row[0] == epoch)
            elif coming is not None and turns and position.epoch == epoch:
                position.now.turns = _turns(turns)

    def _row(self, position: Position) -> list[Any]:
        """Where a worker is: epoch, batches, turns, and whether a worker that follows begins a pass there."""
        now, begins = position.now, position.fresh or self._under_way(position)
        return [position.epoch, now.batches, [list(turn) for turn in now.turns], begins]


def _turns(turns: Sequence[Sequence[int]]) -> list[Turn]:
    return [(int(first), int(workers)) for first, workers in turns]

# SPDX-License-Identifier: Apache-2.0
"""Workers that have left their data, or the run, while others go on.

All workers leave a pass at the same batch, or nearly so where they look at the clock. A worker that leaves by a
condition of its own (its own loss, `sys.exit` in one process) takes along what is left of its samples: no other worker
trains on them. The headers of every exchange tell where each worker is. Programs that train for a number of steps go
through their parts again and again, and end after equally many steps in whatever pass: nothing is wrong with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.core.world import World
from paceline.data.sharing.place import ENDED, Place
from paceline.errors import ElsewhereError, MismatchError
from paceline.update.exchange.exchanger import WAITING, ExchangeSummary

logger = logging.getLogger("paceline")

NEAR = 10
"""Workers that leave a pass within a tenth of its batches may have left it by the same condition."""
LOST = "no worker trains on what was left of its samples"
ADVICE = (
    "Let all workers leave at the same place: decide by a value that they share, such as the sum that "
    "run.messages.all_reduce(..) gives"
)


class Departures:
    """Looks at the exchanges of a connection; `made` gives the steps that this worker's program has made."""

    def __init__(self, made: Callable[[], int]) -> None:
        self._made = made
        self._seen: dict[int, set[Place]] = {}  # rank that has left -> where others were beyond it
        self._warned = False
        self._raised = ""  # the program may have caught it, or its thread ended by it

    def look(self, summary: ExchangeSummary, world: World) -> None:
        """Look at an exchange, whose headers fit together, and are not all alike. Raises `ElsewhereError` where a
        worker has ended before it had all of its samples, and others train on."""
        going = [Place.unpack(h.place) for h in summary.headers if h.brings and h.place and not h.leaving]
        if not going:
            return
        furthest = max(going)
        for rank, header in enumerate(summary.headers):
            if not header.place or header.kind == WAITING or (header.brings and not header.leaving):
                continue
            place = Place.unpack(header.place)
            if not _beyond(furthest, place):
                continue
            goes_on = f"other workers go on in pass {furthest.number + 1}"
            ahead = furthest.batches - place.batches if furthest.number == place.number else place.batches
            self._seen.setdefault(rank, set()).add(furthest)
            if header.leaving:
                if (self._made() - place.batches) * NEAR > place.batches:
                    why = f"{world.name(rank)} {place.end}, and its program ended there, while {goes_on}"
                    self._raised = world.sign(f"{why}: {LOST}. {ADVICE}")
                    raise ElsewhereError(self._raised)
            elif len(self._seen[rank]) > 1 and ahead * NEAR >= place.batches:  # else all may leave by the same clock
                text = f"{world.name(rank)} {place.text}, and {goes_on}"
                if furthest.number > place.number:
                    raise ElsewhereError(world.sign(f"{text}: every worker has to go through each pass"))
                if not self._warned and world.rank == 0:
                    logger.warning("%s", world.sign(f"{text}: {LOST}. {ADVICE}"))
                self._warned = True

    def check_ends(self, summary: ExchangeSummary, world: World) -> None:
        """All workers end here, in one pass over their data or after equally many steps; raises `MismatchError` where
        some had not had all of their samples, and others went to the end."""
        if self._raised:
            raise ElsewhereError(self._raised)
        places = {rank: Place.unpack(h.place) for rank, h in enumerate(summary.headers) if h.place}
        last = max(places.values(), default=None)
        early = [rank for rank, place in places.items() if last is not None and _beyond(last, place)]
        by_count = len({place.batches for place in places.values()}) == 1  # of steps, since all leave
        if last is None or last.state != ENDED or not early or by_count:
            return
        said = "; ".join(f"{world.name(rank)} {places[rank].end}" for rank in early)
        raise MismatchError(
            world.sign(
                f"{said}, and its program ended there, while other workers went to the end of pass {last.number + 1}: "
                f"{LOST}. {ADVICE}"
            )
        )


def _beyond(one: Place, other: Place) -> bool:
    """Whether a worker at `one` has gone beyond where another ended."""
    if other.state == ENDED and not other.batches:
        return False  # it has no samples, and cannot tell a pass over none from an evaluation
    if one.number != other.number:
        return one.number > other.number
    return other.state != ENDED and one.batches > other.batches

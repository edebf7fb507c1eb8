# SPDX-License-Identifier: Apache-2.0
"""Keeps the workers of one host at work: who dies is replaced, who dies again and again is given up."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.launch.process import Identity, OutputFiles, Process

EXPELLED = 75
"""Exit code of a worker that the control plane has given up: a fresh one may come."""
MOST = 5
"""So many deaths in a row before an exchange of theirs counted, and a place is given up."""
PAUSES_S = (0.0, 0.0, 1.0, 2.0, 4.0)
"""Before a place is filled again, by how many died there in a row before an exchange of theirs counted."""
GRACE_S = 5.0
"""Between the request to stop and the order, as for every other run."""
POLL_S = 0.02


@dataclass(frozen=True)
class What:
    """What every worker of a launcher runs.

    Attributes:
        arguments: the command.
        environment: all of it, but for the place.
        output: directory of the files that workers leave.
        folder: where they run.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    output: Path
    folder: str = "."


@dataclass(frozen=True)
class Death:
    """A worker that ended otherwise than well.

    Attributes:
        place: of this host.
        turn: its number among the processes of that place, from 1.
        code: its return code; -n for signal n.
        stderr: what it said last.
        late: somebody had ended well before, so that nobody took its place.
    """

    place: int
    turn: int
    code: int
    stderr: Path
    late: bool = False


@dataclass
class WorkerPlace:
    """Where one worker after another works.

    Attributes:
        turn: the number of its process, from 1; 0 before the first.
        process: None where one is due.
        due_at: when the next one is to be started; None while one runs, and where none will come.
        ended_well: its last worker ended with 0.
        fruitless: how many died here in a row before an exchange of theirs counted.
        given_up: so many did that no more are started.
    """

    turn: int = 0
    process: Process | None = None
    due_at: float | None = 0.0
    ended_well: bool = False
    fruitless: int = 0
    given_up: bool = False

    def after(self, now: float, exchanged: bool) -> None:
        """A worker died here, before or after an exchange of its own counted: when the next may come, if any."""
        self.fruitless = 0 if exchanged else self.fruitless + 1
        self.given_up = self.fruitless >= MOST
        self.due_at = None if self.given_up else now + PAUSES_S[self.fruitless]


class Supervisor:
    """The workers of this host.

    Args:
        what: they run.
        places: how many.
        told: called with what happens ("started", "ended") and facts about it.
        changed: called whenever the record of the launcher has to be written.
        clock: seconds.

    Attributes:
        deaths: all workers that ended otherwise than well, in order.
        over: somebody ended well, here or elsewhere: nobody is replaced any more.
    """

    def __init__(
        self,
        what: What,
        places: int,
        told: Callable[[str, dict[str, Any]], None] = lambda kind, facts: None,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.clock = what, clock
        self.told, self.changed = told, changed
        self.places = [WorkerPlace() for _ in range(places)]
        self.deaths: list[Death] = []
        self.over = False

    def look(self, may_start: Callable[[], bool] = lambda: True) -> None:
        """See who ended, and start who is due; `may_start` is asked before somebody is."""
        for number, place in enumerate(self.places):
            self._see(number, place)
        if self.over:
            return
        for number, place in enumerate(self.places):
            if place.due_at is not None and place.due_at <= self.clock() and may_start():
                self._start(number, place)

    def _see(self, number: int, place: WorkerPlace) -> None:
        code = None if place.process is None else place.process.poll()
        if place.process is None or code is None:
            return
        files, place.process = place.process.files, None
        if code == 0:
            place.ended_well = self.over = True
        else:
            self.deaths.append(Death(number, place.turn, code, files.stderr, self.over))
            place.after(self.clock(), files.exchanged.exists())
        self.told("ended", {"place": number, "turn": place.turn, "code": code, "given_up": place.given_up})
        self.changed()

    def _start(self, number: int, place: WorkerPlace) -> None:
        place.turn, place.due_at = place.turn + 1, None
        self.changed()  # before: a launcher that dies within the next line looks for this turn's files
        files = OutputFiles.of(self.what.output, number, place.turn)
        own = {"LOCAL_RANK": str(number), "PACELINE_EXCHANGED": str(files.exchanged.absolute())}
        environment = {**self.what.environment, **own}
        place.process = Process.start(self.what.arguments, environment, files, self.what.folder)
        self.changed()
        self.told("started", {"place": number, "turn": place.turn, "pid": place.process.identity.pid})

    @property
    def running(self) -> list[tuple[int, int, Process]]:
        """Place, turn and process of those that run."""
        return [(n, place.turn, place.process) for n, place in enumerate(self.places) if place.process is not None]

    @property
    def waiting(self) -> bool:
        """Whether anybody is still to be started."""
        return not self.over and any(place.due_at is not None for place in self.places)

    @property
    def finished(self) -> int:
        """Places whose worker ended well."""
        return sum(place.ended_well for place in self.places)

    def stop(self, how: signal.Signals, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask everybody to stop, and after the grace end them and their children."""
        running = [process for _, _, process in self.running]
        for process in running:
            process.signal(how)
        until = time.monotonic() + GRACE_S
        while any(process.poll() is None for process in running) and time.monotonic() < until and not hurry():
            time.sleep(POLL_S)
        for process in running:
            process.signal(signal.SIGKILL)
        until = time.monotonic() + GRACE_S
        while any(process.poll() is None for process in running) and time.monotonic() < until:
            time.sleep(POLL_S)

    def state(self) -> list[dict[str, Any]]:
        """For the record: who runs where."""
        return [
            {
                "place": number,
                "turn": place.turn,
                "process": None if place.process is None else place.process.identity.state(),
                "ended_well": place.ended_well,
                "fruitless": place.fruitless,
                "given_up": place.given_up,
                "due": place.due_at is not None,
            }
            for number, place in enumerate(self.places)
        ]

    def take_over(self, state: Sequence[Mapping[str, Any]]) -> int:
        """Go on with the workers of an earlier launcher; how many of them still run."""
        self.places = [self._taken(number, row) for number, row in enumerate(state)]
        self.over = any(place.ended_well for place in self.places)
        return sum(process.poll() is None for _, _, process in self.running)

    def _taken(self, number: int, row: Mapping[str, Any]) -> WorkerPlace:
        place = WorkerPlace(
            turn=int(row["turn"]), ended_well=bool(row["ended_well"]), fruitless=int(row.get("fruitless", 0))
        )
        if place.ended_well:
            place.due_at = None
        elif place.turn and not row["due"] and not row["given_up"]:
            identity = None if row["process"] is None else Identity(**row["process"])
            place.process = Process.find(OutputFiles.of(self.what.output, number, place.turn), identity)
            place.due_at = 0.0 if place.process is None else None
        return place

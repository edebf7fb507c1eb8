# SPDX-License-Identifier: Apache-2.0
"""Supervise the workers of one host: replace those that die, stop replacing after several deaths in a row, and let
all leave in order once their launcher gets SIGTERM."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import LEFT
from paceline_plugins.sites.process import Identity, OutputFiles, Process

EXPELLED = 75
"""Exit code of a worker that the control plane declared lost; a new one may start."""
MAX_DEATHS = 5
"""After so many deaths in a row without a committed exchange, a place gets no new worker."""
PAUSES_S = (0.0, 0.0, 1.0, 2.0, 4.0)
"""Before the next worker of a place, by the number of such deaths in a row."""
GRACE_S = 5.0
"""Between the request to stop and SIGKILL, as in other runs."""
POLL_S = 0.02
OF_TIMEOUT = 0.25
"""Of the run's timeout: how long workers may take to leave."""
REASON = "its launcher got SIGTERM"


@dataclass(frozen=True)
class WorkerCommand:
    """The command of every worker."""

    arguments: Sequence[str]  # program and arguments
    environment: Mapping[str, str]  # complete, except for the place
    output: Path  # directory of the workers' files
    folder: str = "."  # working directory
    of_place: Callable[[int], Mapping[str, str]] = lambda place: {}  # further variables of a place
    hopeless: Callable[[Death], bool] = lambda death: False  # whether no successor of that worker could take part


@dataclass(frozen=True)
class Death:
    """A worker that failed."""

    place: int  # of this host
    turn: int  # its number among the processes of that place, from 1
    code: int  # its exit code; -n for signal n
    stderr: Path  # file of its stderr
    late: bool = False  # another worker had succeeded before, so this one was not replaced


@dataclass
class WorkerPlace:
    """A slot for one worker at a time."""

    turn: int = 0  # number of its process, from 1; 0 before the first
    process: Process | None = None  # that runs, if any
    due_at: float | None = 0.0  # time to start the next one; None while one runs, or if none will start
    ended_well: bool = False  # its last worker exited with 0
    fruitless: int = 0  # deaths in a row without a committed exchange
    given_up: bool = False  # after too many of these no more are started
    left: bool = False  # its last worker left in order, or was not started because this host's workers leave

    def after(self, now: float, exchanged: bool) -> None:
        """Schedule the next worker after a death; `exchanged`: the dead one took part in a committed exchange."""
        self.fruitless = 0 if exchanged else self.fruitless + 1
        self.given_up = self.fruitless >= MAX_DEATHS
        self.due_at = None if self.given_up else now + PAUSES_S[self.fruitless]


class Supervisor:
    """The workers of this host.

    Args:
        command: of each worker.
        places: number of workers.
        on_event: called with an event ("started", "ended") and its facts.
        on_change: called whenever the launcher's record has to be written.
        clock: seconds.

    Attributes:
        deaths: of all workers, in order.
        over: a worker succeeded, here or elsewhere: no more are replaced.
        leaving: the workers of this host leave, and no more are started.
    """

    def __init__(
        self,
        command: WorkerCommand,
        places: int,
        on_event: Callable[[str, dict[str, Any]], None] = lambda kind, facts: None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.command, self.clock = command, clock
        self.on_event, self.on_change = on_event, on_change
        self.places = [WorkerPlace() for _ in range(places)]
        self.deaths: list[Death] = []
        self.over = self.leaving = False
        self._asked: set[tuple[int, int]] = set()  # places and turns that were asked to leave

    def look(self, may_start: Callable[[], bool] = lambda: True) -> None:
        """Notice workers that ended, and start those that are due, if `may_start`."""
        for number, place in enumerate(self.places):
            self._poll(number, place)
        if self.over or self.leaving:
            return
        for number, place in enumerate(self.places):
            if place.due_at is not None and place.due_at <= self.clock() and may_start():
                self._start(number, place)

    def _poll(self, number: int, place: WorkerPlace) -> None:
        code = None if place.process is None else place.process.poll()
        if place.process is None or code is None:
            return
        files, place.process = place.process.files, None
        if code == 0:
            place.ended_well = self.over = True
        elif code == LEFT or (code == -signal.SIGTERM and (number, place.turn) in self._asked):
            place.left = True  # the latter before it had anything to leave
        else:
            self.deaths.append(Death(number, place.turn, code, files.stderr, self.over))
            place.after(self.clock(), files.exchanged.exists())
        facts = {"place": number, "turn": place.turn, "code": code}
        if code != 0 and not place.left and self.command.hopeless(self.deaths[-1]):
            place.given_up, place.due_at = True, None
            facts["hopeless"] = True
        self.on_event("ended", {**facts, "given_up": place.given_up} | ({"left": True} if place.left else {}))
        self.on_change()

    def _start(self, number: int, place: WorkerPlace) -> None:
        place.turn, place.due_at, place.left = place.turn + 1, None, False
        self.on_change()  # before the start: after a crash in between, the next launcher looks for this turn's files
        files = OutputFiles.of(self.command.output, number, place.turn)
        own = {"LOCAL_RANK": str(number), "PACELINE_EXCHANGED": str(files.exchanged.absolute())}
        environment = {**self.command.environment, **self.command.of_place(number), **own}
        place.process = Process.start(self.command.arguments, environment, files, self.command.folder)
        self.on_change()
        self.on_event("started", {"place": number, "turn": place.turn, "pid": place.process.identity.pid})

    def leave(self) -> None:
        """Ask all workers to leave in order, each once; call it again until none runs."""
        self.leaving = True
        for place in self.places:
            place.left, place.due_at = place.left or place.due_at is not None, None
        for number, turn, process in self.running:
            if (number, turn) not in self._asked and process.ask_to_leave():
                self._asked.add((number, turn))

    @property
    def running(self) -> list[tuple[int, int, Process]]:
        """Place, turn and process of each running worker."""
        return [(n, place.turn, place.process) for n, place in enumerate(self.places) if place.process is not None]

    @property
    def waiting(self) -> bool:
        """Whether a worker is still to be started."""
        return not self.over and any(place.due_at is not None for place in self.places)

    @property
    def finished(self) -> int:
        """Number of places whose worker succeeded."""
        return sum(place.ended_well for place in self.places)

    def stop(self, how: signal.Signals, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask all workers to stop; after the grace period, or in a hurry, kill them and their children."""
        running = [process for _, _, process in self.running]
        for number, skip in ((how, hurry), (signal.SIGKILL, lambda: False)):
            for process in running:
                process.signal(number)
            until = time.monotonic() + GRACE_S
            while any(process.poll() is None for process in running) and time.monotonic() < until and not skip():
                time.sleep(POLL_S)

    def state(self) -> list[dict[str, Any]]:
        """The places, for the launcher's record."""
        return [
            {
                "place": number,
                "turn": place.turn,
                "process": None if place.process is None else asdict(place.process.identity),
                "ended_well": place.ended_well,
                "fruitless": place.fruitless,
                "given_up": place.given_up,
                "due": place.due_at is not None or place.left,
            }
            for number, place in enumerate(self.places)
        ]

    def take_over(self, state: Sequence[Mapping[str, Any]]) -> int:
        """Adopt the workers of an earlier launcher; returns how many still run."""
        self.places = [self._adopt(number, row) for number, row in enumerate(state)]
        self.over = any(place.ended_well for place in self.places)
        return sum(process.poll() is None for _, _, process in self.running)

    def _adopt(self, number: int, row: Mapping[str, Any]) -> WorkerPlace:
        place = WorkerPlace(
            turn=int(row["turn"]), ended_well=bool(row["ended_well"]), fruitless=int(row.get("fruitless", 0))
        )
        if place.ended_well:
            place.due_at = None
        elif place.turn and not row["due"] and not row["given_up"]:
            identity = None if row["process"] is None else Identity(**row["process"])
            place.process = Process.find(OutputFiles.of(self.command.output, number, place.turn), identity)
            place.due_at = 0.0 if place.process is None else None
        return place


class Departure:
    """Lets the workers of this host leave.

    Args:
        workers: of this host.
        write: writes an event.
        timeout_s: of the run.
    """

    def __init__(self, workers: Supervisor, write: Callable[[str, Mapping[str, Any]], None], timeout_s: float) -> None:
        self._workers, self._write, self._patience_s = workers, write, max(GRACE_S, OF_TIMEOUT * timeout_s)
        self._asked, self._until = False, float("inf")

    def ends_launcher(self, received: Sequence[signal.Signals]) -> bool:
        """Whether the launcher ends now: by a signal, except the first SIGTERM, at which its workers leave first."""
        if not received:
            return False
        if len(received) > 1 or received[0] != signal.SIGTERM or self._workers.over:
            return True
        self._asked = True
        return not self._workers.running or time.monotonic() > self._until

    def look(self) -> None:
        """Let the workers leave, once they are asked to."""
        if not self._asked:
            return
        if self._until == float("inf"):
            self._until = time.monotonic() + self._patience_s
            self._write("leaving", {"reason": REASON, "seconds": round(self._patience_s)})
        self._workers.leave()

    @property
    def left(self) -> str:
        """Why all workers of this host left in order; "" if they did not."""
        gone = not self._workers.running and any(place.left for place in self._workers.places)
        return REASON if gone and self._asked else ""

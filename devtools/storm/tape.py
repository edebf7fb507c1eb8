# SPDX-License-Identifier: Apache-2.0
"""Reads the flight tape of an elastic run, `control.jsonl` in its log directory, as input of unknown origin.

What the events say: :mod:`devtools.storm.recorder`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from devtools.storm.recorder import VERSION

from paceline.data.ledger.epoch_ledger import ENDLESS
from paceline.errors import MismatchError
from paceline.flow.control import validation
from paceline.flow.control.messages import Terms

NAME = "control.jsonl"
MOST_BYTES = 1 << 28
LINE_BYTES = 1 << 20
MOST_WORKERS = 1000
"""That a tape may have in all."""
MOST_UNITS = 1 << 20
"""Minibatches of all epochs."""
SILENT = "it was silent"
"""How the reason of a loss begins if the worker's heartbeats did not come."""


@dataclass(frozen=True)
class Block:
    """What a worker did for an exchange.

    Attributes:
        minibatches: it made.
        seconds: from the last commit, or from its beginning, until it came to this exchange.
    """

    minibatches: int
    seconds: float


@dataclass
class Flight:
    """One worker.

    Attributes:
        worker: its number.
        host: its host's name.
        joined_s: when it joined.
        after: exchanges that were committed before that.
        held_s: when it held the state.
        end: "lost", "left", or "" if the tape ends before.
        end_s: when.
        silent: whether it was lost because it was silent.
        came, reported: the last exchange that it came to, and the last that it reported complete.
        after_s: seconds from then to its end.
        blocks: by exchange.
    """

    worker: int
    host: str
    joined_s: float
    after: int
    held_s: float = 0.0
    end: str = ""
    end_s: float = 0.0
    silent: bool = False
    came: int = 0
    reported: int = 0
    after_s: float = 0.0
    blocks: dict[int, Block] = field(default_factory=dict)


@dataclass(frozen=True)
class Restart:
    """The control plane was away.

    Attributes:
        after: exchanges that were committed before.
        after_s: seconds from the last one to the last event.
        away_s: seconds until it was there again.
    """

    after: int
    after_s: float
    away_s: float


@dataclass
class Tape:
    """A run.

    Attributes:
        terms: of its control plane.
        rule: of the run; "" if no worker has said so.
        numbers: parameters of the model.
        flights: its workers, in the order in which they joined.
        data: places of an epoch, places of a minibatch, and the most minibatches of a lease.
        epochs: that were begun.
        generations: number and members, up to the first worker that came to its end.
        exchanges: that were committed.
        commits: when each was, in seconds.
        wires: bytes that each worker has sent in an exchange, and seconds that it took once all had come.
        restarts: of the control plane.
        seconds: from the first event to the last.
    """

    terms: Terms
    rule: str = ""
    numbers: int = 0
    flights: list[Flight] = field(default_factory=list)
    data: tuple[int, int, int] = (0, 1, 1)
    epochs: int = 0
    generations: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    exchanges: int = 0
    commits: dict[int, float] = field(default_factory=dict)
    wires: list[tuple[int, float]] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sent(self) -> float:
        """Bytes of an exchange, in the median; 0 if that is not known."""
        return median([sent for sent, _ in self.wires] or [0])

    @property
    def wire_s(self) -> float:
        """Seconds of an exchange, in the median."""
        return median([seconds for _, seconds in self.wires] or [0.0])

    def pace(self, worker: int | None = None) -> Block:
        """The median block of one worker, or of all."""
        blocks = [
            block
            for one in self.flights
            for block in one.blocks.values()
            if worker in (None, one.worker) and block.minibatches
        ]
        if not blocks:
            return Block(1, 0.1) if worker is None else self.pace()
        made = max(1, round(median([one.minibatches for one in blocks])))
        return Block(made, made * median([one.seconds / one.minibatches for one in blocks]))


@dataclass(frozen=True)
class Played:
    """What is played.

    Attributes:
        tape: of the run.
        exact: whether nothing is changed, so that events can be placed by the exchanges around them; else by time.
        block: minibatches of a block; None: as recorded.
        wire_s: seconds of an exchange; None: as recorded.
    """

    tape: Tape
    exact: bool = True
    block: int | None = None
    wire_s: float | None = None


def _seconds(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value < 1e9:
        raise MismatchError(f"{what} are seconds from 0 on, got {value!r:.80}")
    return float(value)


def _lines(path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    """Number and contents of each line."""
    if not path.is_file():
        raise MismatchError(f"{path} is no file: name the log directory of an elastic run, or its {NAME}")
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise MismatchError(f"{path} has {size} bytes, and a tape at most {MOST_BYTES}")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if len(line) > LINE_BYTES:
                raise MismatchError(f"line {number} of {path} has {len(line)} bytes, and may have {LINE_BYTES}")
            if not line.endswith(b"\n"):
                raise MismatchError(
                    f"line {number} of {path} is cut off: the tape was not written to its end, or not copied whole"
                )
            try:
                said = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise MismatchError(f"line {number} of {path} is no JSON: {str(error)[:200]}") from None
            if not isinstance(said, dict) or not isinstance(said.get("kind"), str):
                raise MismatchError(f"line {number} of {path} is no event: a JSON object with a kind")
            yield number, said


def read(place: Path) -> Tape:
    """The tape of a run.

    Args:
        place: its log directory, or the file.

    Raises:
        MismatchError: it is not one, or is damaged.
        OSError: it cannot be read.
    """
    path = place / NAME if place.is_dir() else place
    reader = _Reader()
    for number, said in _lines(path):
        try:
            reader.add(said["kind"], said)
        except MismatchError as error:
            raise MismatchError(f"line {number} of {path}: {error}") from None
    if reader.tape is None:
        raise MismatchError(f"{path} has no flight tape in it: it is of another program, or of an older paceline")
    tape = reader.tape
    if not tape.flights or not tape.data[0]:
        raise MismatchError(f"the tape {path} has nothing to replay: no worker of the run has asked for data")
    if tape.epochs * -(-tape.data[0] // tape.data[1]) > MOST_UNITS:
        raise MismatchError(
            f"the tape {path} has {tape.epochs} epochs of {tape.data[0]} places in batches of {tape.data[1]}: more "
            f"than {MOST_UNITS} minibatches are not replayed"
        )
    return tape


class _Reader:
    """Puts a tape together, event by event."""

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self._living: dict[int, Flight] = {}
        self._last, self._began = 0.0, 0.0
        self._most = (0, 0)  # loader and places of the data that are replayed

    def add(self, kind: str, said: dict[str, Any]) -> None:
        """The next event."""
        now = _seconds(said.get("at_s"), "at_s")
        if kind == "gap":
            raise MismatchError("events are missing here: the disk was full, and the run cannot be replayed")
        if kind in ("grown", "held"):
            raise MismatchError("the number of members of this run was to grow: that is not replayed")
        if kind == "tape":
            self._start(said, now)
        tape = self.tape
        if tape is None:
            return
        self._last = max(self._last, now)
        tape.seconds = self._last - self._began
        if kind in _EVENTS:
            _EVENTS[kind](self, tape, said, now - self._began)

    def _start(self, said: dict[str, Any], now: float) -> None:
        if said.get("version") != VERSION:
            raise MismatchError(
                f"the tape is of version {said.get('version')!r:.20}, and this paceline reads {VERSION}"
            )
        if self.tape is None:
            self._began = self._last = now
            self.tape = Tape(_terms(said.get("terms")))
            return
        tape = self.tape
        since = self._began + tape.commits.get(tape.exchanges, 0.0)
        tape.restarts.append(Restart(tape.exchanges, max(0.0, self._last - since), max(0.0, now - self._last)))

    def _flight(self, said: dict[str, Any]) -> Flight:
        worker = validation.whole(said.get("worker"), 0, validation.WORKERS, "a worker's number")
        if worker not in self._living:
            raise MismatchError(f"worker {worker} has not joined, or is gone")
        return self._living[worker]

    def _program(self, tape: Tape, said: dict[str, Any], now: float) -> None:
        tape.rule = validation.text(said.get("rule"), 500, "a rule")
        tape.numbers = validation.whole(said.get("numbers"), 0, validation.HUGE, "parameters")

    def _joined(self, tape: Tape, said: dict[str, Any], now: float) -> None:
        worker = validation.whole(said.get("worker"), 0, validation.WORKERS, "a worker's number")
        host = validation.text(said.get("host"), 255, "a host")
        if worker in self._living or any(one.worker >= worker for one in tape.flights):
            raise MismatchError(f"worker {worker} joins twice, or out of order")
        if len(tape.flights) >= MOST_WORKERS:
            raise MismatchError(f"more than {MOST_WORKERS} workers are not replayed")
        one = self._living[worker] = Flight(worker, host, now, tape.exchanges, now)
        tape.flights.append(one)

    def _gone(self, tape: Tape, said: dict[str, Any], now: float) -> None:
        one = self._flight(said)
        one.end, one.end_s = "left" if said["kind"] == "left" else "lost", now  # a replay kills who left early
        one.silent = str(said.get("why", "")).startswith(SILENT)
        one.came = validation.whole(said.get("came"), 0, validation.HUGE, "an exchange")
        one.reported = validation.whole(said.get("reported"), 0, validation.HUGE, "an exchange")
        one.after_s = _seconds(said.get("after_s"), "after_s")
        del self._living[one.worker]

    def _holds(self, tape: Tape, said: dict[str, Any], now: float) -> None:
        self._flight(said).held_s = now

    def _generation(self, tape: Tape, said: dict[str, Any], now: float) -> None:
        number = validation.whole(said.get("number"), 1, validation.HUGE, "a generation")
        places = [validation.rows(one, "a place") for one in validation.rows(said.get("members"), "members")]
        members = [place[0] if place else None for place in places]
        if not any(one.end == "left" for one in tape.flights):
            tape.generations.append((number, tuple(validation.workers(members))))

    def _data(self, tape: Tape, said: dict[str, Any], now: float) -> None:
        loader, epoch = validation.number(said.get("loader")), validation.stage(said.get("epoch"))
        total = validation.whole(said.get("total"), 0, ENDLESS, "places of an epoch")
        unit = validation.whole(said.get("unit"), 1, ENDLESS, "places of a minibatch")
        most = validation.whole(said.get("most"), 1, ENDLESS, "minibatches of a lease")
        if total == ENDLESS:
            raise MismatchError("the data have no known length: a run over them is not replayed")
        if total > self._most[1] or loader == self._most[0]:
            tape.epochs = max(tape.epochs, epoch + 1) if loader == self._most[0] else epoch + 1
            self._most, tape.data = (loader, total), (total, unit, most)

    def _exchange(self, tape: Tape, said: dict[str, Any], now: float) -> None:
        number = validation.whole(said.get("exchange"), 1, validation.HUGE, "an exchange")
        if number != tape.exchanges + 1:
            raise MismatchError(f"exchange {number} follows exchange {tape.exchanges}")
        before = tape.commits.get(tape.exchanges, 0.0)
        for row in validation.rows(said.get("workers"), "the workers of an exchange"):
            worker, waited_s, made, _, _, sent, wire_s = validation.row(row, 7, "a worker of an exchange")
            flight = self._flight({"worker": worker})
            made = validation.whole(made, 0, MOST_UNITS, "minibatches")
            since = max(before, flight.held_s)
            flight.blocks[number] = Block(made, max(0.0, now - _seconds(waited_s, "a wait") - since))
            wire = validation.whole(sent, 0, validation.HUGE, "bytes"), _seconds(wire_s, "an exchange")
            if made:
                tape.wires.append(wire)
        tape.exchanges, tape.commits[number] = number, now


_EVENTS: dict[str, Any] = {
    "program": _Reader._program,
    "joined": _Reader._joined,
    "lost": _Reader._gone,
    "left": _Reader._gone,
    "left early": _Reader._gone,
    "holds": _Reader._holds,
    "generation": _Reader._generation,
    "data": _Reader._data,
    "exchange": _Reader._exchange,
}


def _terms(said: Any) -> Terms:
    """Of a control plane."""
    given = validation.table(said, "the terms")
    whole = {
        name: validation.whole(given.get(name), 0, 1 << 20, name) for name in ("min_workers", "max_workers", "expected")
    }
    times = {name: _seconds(given.get(name), name) for name in ("timeout_s", "start_s", "quorum_s")}
    grace_s = None if given.get("grace_s") is None else _seconds(given["grace_s"], "grace_s")
    try:
        return Terms(
            min_workers=whole["min_workers"],
            max_workers=whole["max_workers"],
            timeout_s=times["timeout_s"],
            grace_s=grace_s,
            start_s=times["start_s"],
            expected=whole["expected"],
            quorum_s=times["quorum_s"],
        )
    except ValueError as error:
        raise MismatchError(str(error)) from None


def without(tape: Tape, deaths: Iterable[int]) -> Tape:
    """The run in which these workers were not lost, and nobody was started in their places.

    Raises:
        MismatchError: one of them was not lost.
    """
    lost = {one.worker: one for one in tape.flights if one.end == "lost"}
    flights = list(tape.flights)
    for worker in deaths:
        if worker not in lost:
            raise MismatchError(f"worker {worker} was not lost in this run; lost were {sorted(lost) or 'none'}")
        one = lost[worker]
        flights = [replace(each, end="", came=0, reported=0) if each is one else each for each in flights]
        later = [each for each in flights if each.host == one.host and each.joined_s >= one.end_s]
        if later:
            flights.remove(later[0])
    return replace(tape, flights=flights)

# SPDX-License-Identifier: Apache-2.0
"""What the state machine knows about one worker, and what it has to say to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.data.ledger.epoch_ledger import Mark
from paceline.flow.control.messages import Place


@dataclass(frozen=True)
class Answer:
    """Something to say.

    Attributes:
        worker: to whom; None: an event for the log.
        kind: what.
        serial: of the request that is answered, 0 for none.
        numbers: of the frame.
        note: JSON's terms.
    """

    worker: int | None
    kind: str
    serial: int = 0
    numbers: tuple[int, ...] = ()
    note: Any = None


@dataclass(frozen=True)
class Commit:
    """A worker has come through an exchange.

    Attributes:
        serial: of its request.
        marks: the places whose work went into it.
        facts: what else it said, for people.
        returned: places whose work was left out of it.
    """

    serial: int
    marks: list[Mark]
    facts: dict[str, Any]
    returned: list[Mark] = field(default_factory=list)


@dataclass
class WorkerRecord:
    """A worker that lives.

    Attributes:
        place: where.
        secret: what it must say to come back.
        seen: when it was heard last.
        member: whether it is one; else it waits to be taken in.
        holds: whether it holds the state of the last committed exchange.
        absent: since when a server that was started again waits for it; None: it is here.
        told: the last of its numbered messages that were carried out.
        asked: the last of its questions that was answered.
        started: the highest exchange to which it has come.
        called: the highest to which it was called.
        late: it was taken in while others had come to an exchange already.
        dry: it asked for work, has none left, and got nothing.
        left: it has ended its pass before the epoch was over.
        waits: it waits for the others, as at a checkpoint.
        commit: what it said at the exchange under way.
        failed: the serial of its complaint about the exchange under way.
        doing: what it does, in its own words.
        since: since when.
        step: its steps of training.
    """

    place: Place
    secret: str
    seen: float
    member: bool = False
    holds: bool = False
    absent: float | None = None
    told: int = 0
    asked: int = 0
    started: int = 0
    called: int = 0
    late: bool = False
    dry: bool = False
    left: bool = False
    waits: bool = False
    commit: Commit | None = None
    failed: int | None = None
    doing: str = ""
    since: float = 0.0
    step: int = 0

    @property
    def worker(self) -> int:
        """Its number."""
        return self.place.worker

    @property
    def name(self) -> str:
        """For people."""
        return f"worker {self.worker} on {self.place.host}"

    @property
    def idle(self) -> bool:
        """Whether it does nothing that an exchange would interrupt."""
        return self.dry or self.left or self.waits
